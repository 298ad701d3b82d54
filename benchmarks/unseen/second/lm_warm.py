import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = "in a hole in the ground there lived a small round animal that liked tea and maps and quiet rainy evenings " * 30
CHARS = sorted(set(TEXT))
DATA = torch.tensor([CHARS.index(c) for c in TEXT])


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        s = (q * (d // self.heads) ** -0.5) @ k.transpose(-1, -2)
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        x = x + self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class LM(nn.Module):
    def __init__(self, dim=48, depth=2, ctx=24):
        super().__init__()
        self.tok = nn.Embedding(len(CHARS), dim)
        self.pos = nn.Parameter(torch.zeros(ctx, dim))
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, len(CHARS))

    def forward(self, x):
        h = self.tok(x) + self.pos
        for b in self.blocks:
            h = b(h)
        return self.head(self.norm(h))


torch.manual_seed(0)
model = LM()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 30))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 24)
for step in range(90):
    i = torch.randint(len(DATA) - 25, (16,)).tolist()
    x = torch.stack([DATA[j:j + 24] for j in i])
    y = torch.stack([DATA[j + 1:j + 25] for j in i])
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    scaler.step(opt)
    scaler.update()
    warm.step()
    if step < 5 or step % 15 == 14:
        print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.3f} scale {scaler.get_scale():g}")
