import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        kw = dict(dtype=base.weight.dtype)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, **kw) / base.in_features ** 0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **kw))
        self.gain = alpha / rank

    def forward(self, x):
        return self.base(x) + self.gain * F.linear(F.linear(x, self.down), self.up)


class TextModel(nn.Module):
    def __init__(self, vocab=64, dim=48, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.fc1 = nn.Linear(dim, 96)
        self.fc2 = nn.Linear(96, dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, ids):
        h = self.emb(ids).mean(1)
        h = h + self.fc2(F.gelu(self.fc1(h)))
        return self.head(h)


def batches(n, topics, size=64):
    for _ in range(n):
        y = torch.randint(len(topics), (size,))
        yield torch.multinomial(topics[y], 20, replacement=True), y


def build():
    model = TextModel().half()
    model.requires_grad_(False)
    model.fc1 = LoRALinear(model.fc1)
    model.fc2 = LoRALinear(model.fc2)
    model.head = LoRALinear(model.head)
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    topics = torch.softmax(2 * torch.randn(4, 64), -1)
    model = build()
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    print("trainable", sum(p.numel() for p in params))
    for step, (ids, y) in enumerate(batches(120, topics)):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(ids).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(opt)
        scaler.update()
        if step % 20 == 19:
            print(f"step {step + 1} loss {loss.item():.4f}")
