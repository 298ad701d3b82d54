"""Vision transformer on tiny images: patches, class token, pre-norm blocks, label smoothing."""
import torch
from torch import nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dots = (q @ k.transpose(-1, -2)) * self.scale
        weights = dots.softmax(dim=-1)
        mixed = (weights @ v).transpose(1, 2).reshape(b, n, d)
        return self.to_out(mixed)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.expand = nn.Linear(dim, hidden)
        self.contract = nn.Linear(hidden, dim)

    def forward(self, x):
        x = F.gelu(self.expand(x))
        return self.contract(x)


class ViT(nn.Module):
    def __init__(self, dim=24, depth=2, classes=4):
        super().__init__()
        self.patch = nn.Linear(9, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 17, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.attn = nn.ModuleList(Attention(dim) for _ in range(depth))
        self.ff = nn.ModuleList(FeedForward(dim, 2 * dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, img):
        patches = img.unfold(1, 3, 3).unfold(2, 3, 3).flatten(3).flatten(1, 2)
        x = self.patch(patches)
        x = torch.cat([self.cls.expand(len(x), -1, -1).to(x.dtype), x], dim=1) + self.pos
        for i, (attn, ff) in enumerate(zip(self.attn, self.ff)):
            x = x + attn(self.norms[2 * i](x))
            x = x + ff(self.norms[2 * i + 1](x))
        return self.head(x[:, 0])


def images(n, rng):
    label = torch.randint(4, (n,), generator=rng)
    img = 0.5 * torch.randn(n, 12, 12, generator=rng)
    row, col = label // 2, label % 2
    for i in range(n):
        img[i, 6 * row[i] : 6 * row[i] + 6, 6 * col[i] : 6 * col[i] + 6] += 1.0
    return img, label


def run_epoch(model, optimizer, scaler, rng, iters):
    total = 0.0
    for _ in range(iters):
        img, label = images(12, rng)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(img)
            loss = F.cross_entropy(logits, label)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total / iters


def main():
    torch.set_num_threads(1)
    torch.manual_seed(121)
    rng = torch.Generator().manual_seed(121)
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for epoch in range(4):
        print(f"epoch {epoch}: loss {run_epoch(model, optimizer, scaler, rng, 11):.4f}")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        img, label = images(64, rng)
        print(f"test: loss {F.cross_entropy(model(img), label).item():.4f}")


if __name__ == "__main__":
    main()
