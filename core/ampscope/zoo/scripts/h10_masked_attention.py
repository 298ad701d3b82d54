"""Masked attention with saturating gates over sets of different sizes."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SetAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        # fixed random hyperplanes, as in locality-sensitive hashing
        self.planes = nn.Linear(5, dim, bias=False).requires_grad_(False)
        self.sharpness = 2.0e4  # nearly a sign function

    def forward(self, x, points, mask):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q * q.size(-1) ** -0.5) @ k.transpose(1, 2)
        scores = scores.masked_fill(~mask[:, None, :], torch.finfo(scores.dtype).min)
        mixed = F.softmax(scores, dim=-1) @ v
        return mixed * torch.tanh(self.planes(points) * self.sharpness)


class SetNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.attention = SetAttention(dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x, mask):
        h = self.inp(x)
        h = self.norm(h + self.attention(h, x, mask))
        pooled = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.out(pooled).squeeze(-1)


def make_sets(n, generator):
    sizes = torch.randint(2, 9, (n, 1), generator=generator)
    mask = torch.arange(8) < sizes
    x = 8.0 * torch.randn(n, 8, 5, generator=generator) * mask[..., None]
    target = torch.tanh(x[:, :, 0].sum(1) / sizes.squeeze(1) / 4)
    return x, mask, target


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(3)
    model = SetNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler(device)
    for step in range(60):
        x, mask, target = (t.to(device) for t in make_sets(64, generator))
        with torch.autocast(device, dtype=torch.float16):
            loss = F.mse_loss(model(x, mask), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 12 == 0:
            print(f"step {step:2d} | loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
