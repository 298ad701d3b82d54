"""Self-supervised tabular embedding: two noisy views, invariance + spread + decorrelation."""
from types import SimpleNamespace
import torch
from torch import nn

cfg = SimpleNamespace(seed=2, cols=16, hidden=64, out=48, batch=24, iters=200, lr=2e-3, w_inv=5.0, w_spread=5.0, w_cov=0.2)
torch.manual_seed(cfg.seed)


class ChannelDrop(nn.Module):
    """Drops output channels for the whole batch; the rate is ramped by the loop."""

    rate = 0.0

    def forward(self, x):
        keep = torch.rand(1, x.size(-1), device=x.device) >= self.rate
        return x * keep / (1 - self.rate)


class Projector(nn.Sequential):
    def __init__(self, i, h, o):
        super().__init__(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, o), ChannelDrop())


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(cfg.cols, cfg.hidden), nn.LayerNorm(cfg.hidden), nn.ReLU())
        self.project = Projector(cfg.hidden, cfg.hidden, cfg.out)

    def forward(self, x):
        return self.project(self.base(x))


class SpreadLoss(nn.Module):
    def forward(self, z):
        std = z.var(dim=0).sqrt()
        return torch.relu(1.0 - std).mean()


class DecorrelationLoss(nn.Module):
    def forward(self, z):
        z = z - z.mean(0)
        c = z.t() @ z / (len(z) - 1)
        return (c - torch.diag(torch.diag(c))).float().square().sum() / z.size(1)


class Objective(nn.Module):
    def __init__(self):
        super().__init__()
        self.spread, self.decor = SpreadLoss(), DecorrelationLoss()

    def forward(self, a, b):
        inv = nn.functional.mse_loss(a, b)
        spread = self.spread(a.float()) + self.spread(b.float())
        return cfg.w_inv * inv + cfg.w_spread * spread + cfg.w_cov * (self.decor(a) + self.decor(b))


def views(n):
    latent = torch.randn(n, 4)
    x = torch.tanh(latent @ mixing)
    return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)


mixing = torch.randn(4, cfg.cols)
enc, objective = Encoder(), Objective()
opt = torch.optim.Adam(enc.parameters(), lr=cfg.lr)

for it in range(cfg.iters):
    a, b = views(cfg.batch)
    enc.project[-1].rate = 0.04 * max(0.0, it - 70) / cfg.iters
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = objective(enc(a), enc(b))
    loss.backward()
    opt.step()
    if it % 25 == 0 or it == cfg.iters - 1:
        print(f"iter {it:3d} objective {loss.item():.4f}")
