import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = ("the quick brown fox jumps over the lazy dog while the small cat sleeps on the warm stone near the river "
        "and the old man reads a long letter from his brother who lives in a far town by the sea ") * 20
VOCAB = sorted(set(TEXT))
IDS = torch.tensor([VOCAB.index(c) for c in TEXT])
MIN_SCALE = 2.0 ** 22


class MoE(nn.Module):
    def __init__(self, dim, experts=4):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(experts))

    def forward(self, x):
        w = self.gate(x).softmax(-1)
        top, idx = w.topk(2, -1)
        gate = torch.zeros_like(w).scatter(-1, idx, top / top.sum(-1, keepdim=True))
        return sum(gate[..., i:i + 1] * e(x) for i, e in enumerate(self.experts))


class CharLM(nn.Module):
    def __init__(self, dim=32, context=8):
        super().__init__()
        self.emb = nn.Embedding(len(VOCAB), dim)
        self.mix = nn.Linear(context * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.moe = MoE(dim)
        self.head = nn.Linear(dim, len(VOCAB))

    def forward(self, ids):
        h = F.gelu(self.mix(self.emb(ids).flatten(1)))
        h = h + self.moe(self.norm(h))
        return self.head(h)


class Trainer:
    def __init__(self, model):
        self.model = model
        self.opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        if self.scaler.get_scale() < MIN_SCALE:
            self.scaler.update(new_scale=MIN_SCALE)
        return loss.item()


def main(steps=120, batch=64, context=8):
    torch.manual_seed(0)
    trainer = Trainer(CharLM(context=context))
    for s in range(steps):
        pos = torch.randint(len(IDS) - context - 1, (batch,))
        x = torch.stack([IDS[p:p + context] for p in pos.tolist()])
        loss = trainer.step(x, IDS[pos + context])
        if s % 20 == 19:
            print(f"step {s + 1} loss {loss:.4f}")


main()
