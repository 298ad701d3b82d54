import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)


def images(n):
    y = torch.randint(4, (n,))
    img = 90 + 40 * torch.randn(n, 32, 32)
    for i, c in enumerate(y.tolist()):
        r, q = (c // 2) * 16, (c % 2) * 16
        img[i, r:r + 16, q:q + 16] += 70
    return img.clamp(0, 255).round() - 128, y


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def split(self, t):
        b, n, d = t.shape
        return t.view(b, n, self.heads, d // self.heads).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        y = att.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = Attention(dim, heads)
        self.n1 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.n2 = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.n1(x + self.attn(x))
        return self.n2(x + self.mlp(x))


class ViT(nn.Module):
    def __init__(self, dim=64, depth=2, heads=1, patch=8):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 16, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(16 * dim, 4)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.xavier_uniform_(p)

    def forward(self, img):
        p = F.unfold(img.unsqueeze(1), self.patch, stride=self.patch).transpose(1, 2)
        x = self.embed(p) + self.pos
        for blk in self.blocks:
            x = blk(x)
        return self.head(x.flatten(1))


model = ViT()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(50):
    x, y = images(32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        print(step + 1, "loss", round(loss.item(), 4), "scale", scaler.get_scale())
