"""Adaptive sharpness-aware minimisation: each of the two passes has a scaler of its own."""

import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
x_all = torch.randn(512, 16)
y_all = teacher(x_all).argmax(1)


def batches(n):
    g = torch.Generator().manual_seed(1)
    for _ in range(n):
        i = torch.randint(0, 512, (32,), generator=g)
        yield x_all[i], y_all[i]


def net():
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


model = net()


class SharpnessAware:
    """Wraps an optimizer; both passes scaled by scalers of their own."""

    def __init__(self, model, base, rho=0.5, eta=0.01):
        self.model, self.base, self.rho, self.eta = model, base, rho, eta
        self.eps = {}

    @torch.no_grad()
    def ascend(self, scale):
        grads = [p.grad / scale for p in self.model.parameters()]
        if not all(torch.isfinite(g).all() for g in grads):
            self.base.zero_grad()
            return False
        ts = [p.abs() + self.eta for p in self.model.parameters()]
        norm = torch.sqrt(sum((t * g).square().sum() for t, g in zip(ts, grads))) + 1e-12
        for p, t, g in zip(self.model.parameters(), ts, grads):
            e = t * t * g * (self.rho / norm)
            p.add_(e)
            self.eps[p] = e
        self.base.zero_grad()
        return True

    @torch.no_grad()
    def descend(self):
        for p, e in self.eps.items():
            p.sub_(e)
        self.eps.clear()


base = torch.optim.AdamW(model.parameters(), lr=3e-3)
asam = SharpnessAware(model, base)
first, second = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu")
for step, (x, y) in enumerate(batches(120)):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    first.scale(loss).backward()
    if not asam.ascend(first.get_scale()):
        continue
    with torch.autocast("cpu", dtype=torch.float16):
        loss2 = F.cross_entropy(model(x).float(), y)
    second.scale(loss2).backward()
    asam.descend()
    second.step(base)
    second.update()
    base.zero_grad()
    if step % 20 == 0:
        print("step", step, "loss", float(loss), "scale", second.get_scale())
