"""Long-document classification: T5 encoder per section, attention pooling over sections' tokens."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5EncoderModel, get_linear_schedule_with_warmup

torch.set_num_threads(1)
torch.manual_seed(3)
VOCAB, SECTIONS, LENGTH, CLASSES = 120, 3, 12, 4


class Documents(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids, self.mask, self.y = [], [], []
        for _ in range(n):
            y = int(torch.randint(0, CLASSES, (1,), generator=g))
            k = int(torch.randint(1, SECTIONS + 1, (1,), generator=g))
            ids = torch.zeros(SECTIONS, LENGTH, dtype=torch.long)
            mask = torch.zeros(SECTIONS, LENGTH, dtype=torch.long)
            for s in range(k):
                m = int(torch.randint(5, LENGTH + 1, (1,), generator=g))
                tok = torch.randint(30, VOCAB, (m,), generator=g)
                topic = torch.rand(m, generator=g) < 0.35
                tok[topic] = 2 + 6 * y + torch.randint(0, 6, (int(topic.sum()),), generator=g)
                ids[s, :m], mask[s, :m] = tok, 1
            self.ids.append(ids)
            self.mask.append(mask)
            self.y.append(y)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.ids[i], self.mask[i], self.y[i]


class AttentionPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))

    def forward(self, hidden, mask):
        scores = self.score(hidden).squeeze(-1)
        scores = scores + (1.0 - mask.to(scores.dtype)) * -1e9
        weights = scores.softmax(dim=-1)
        return (weights.unsqueeze(-1) * hidden).sum(dim=1)


class SectionClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = T5Config(vocab_size=VOCAB, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
                       dropout_rate=0.0, is_encoder_decoder=False, use_cache=False)
        self.encoder = T5EncoderModel(cfg)
        self.pool = AttentionPool(cfg.d_model)
        self.head = nn.Linear(cfg.d_model, CLASSES)

    def forward(self, ids, mask):
        b, s, t = ids.shape
        flat_mask = mask.view(b * s, t)
        hidden = self.encoder(input_ids=ids.view(b * s, t), attention_mask=flat_mask).last_hidden_state
        pooled = self.pool(hidden, flat_mask).view(b, s, -1)
        present = mask.any(dim=-1, keepdim=True).to(pooled.dtype)
        doc = (pooled * present).sum(1) / present.sum(1)
        return self.head(doc)


def main():
    model = SectionClassifier()
    train = DataLoader(Documents(320, 1), batch_size=16, shuffle=True)
    val = DataLoader(Documents(64, 2), batch_size=32)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    epochs = 5
    sched = get_linear_schedule_with_warmup(opt, 10, epochs * len(train))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        model.train()
        for i, (ids, mask, y) in enumerate(train):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(model(ids, mask), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            sched.step()
            if i % 5 == 0:
                print(f"epoch {epoch} it {i} loss {loss.item():.4f} scale {scaler.get_scale():g}", flush=True)
        model.eval()
        hits = 0
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            for ids, mask, y in val:
                hits += (model(ids, mask).argmax(-1) == y).sum().item()
        print(f"epoch {epoch} val acc {hits / 64:.3f}", flush=True)


if __name__ == "__main__":
    main()
