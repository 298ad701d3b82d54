"""Normalising flow with affine couplings on two moons."""
import math
import torch
import torch.nn as nn

torch.set_num_threads(1)
torch.manual_seed(91)
gen = torch.Generator().manual_seed(91)


class Coupling(nn.Module):
    def __init__(self, flip, hidden=24):
        super().__init__()
        self.flip = flip
        self.inner = nn.Linear(1, hidden)
        self.outer = nn.Linear(hidden, 2)

    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        if self.flip:
            a, b = b, a
        h = torch.tanh(self.inner(a))
        shift, log_s = self.outer(h).chunk(2, dim=-1)
        log_s = torch.tanh(log_s.float())
        b = b * torch.exp(log_s) + shift.float()
        parts = (b, a) if self.flip else (a, b)
        return torch.cat(parts, dim=-1), log_s.squeeze(-1)


class Flow(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(i % 2 == 1) for i in range(depth))

    def forward(self, x):
        total = torch.zeros(len(x))
        for step in self.steps:
            x, logdet = step(x)
            total = total + logdet
        return x, total


def moons(n):
    t = math.pi * torch.rand(n, generator=gen)
    upper = torch.rand(n, generator=gen) < 0.5
    x = torch.where(upper, t.cos(), 1 - t.cos())
    y = torch.where(upper, t.sin(), 0.5 - t.sin())
    return torch.stack([x - 0.5, y - 0.25], 1) * 2 + 0.1 * torch.randn(n, 2, generator=gen)


def negative_log_likelihood(flow, x):
    z, logdet = flow(x)
    return (0.5 * z.pow(2).sum(-1) + math.log(2 * math.pi) - logdet).mean()


flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
ema = None
for it in range(60):
    points = moons(64)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = negative_log_likelihood(flow, points)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    ema = loss.item() if ema is None else 0.9 * ema + 0.1 * loss.item()
    if it % 15 == 0:
        print(f"iter {it} loss {loss.item():.4f} smoothed {ema:.4f}")
with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
    print(f"test loss {negative_log_likelihood(flow, moons(512)).item():.4f}")
