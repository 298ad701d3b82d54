"""Muon: momentum made orthogonal by Newton-Schulz in bf16; AdamW for vectors and the head."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def orthogonal(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() / (g.norm() + 1e-7)
    if g.shape[0] > g.shape[1]:
        x = x.T
    for _ in range(steps):
        y = x @ x.T
        x = a * x + (b * y + c * y @ y) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buf, group["momentum"])
                p.add_(
                    orthogonal(update).to(p.dtype),
                    alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5,
                )


class Both:
    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for o in self.optimizers:
            o.zero_grad()


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = Both(
    Muon([p for p in model[:-1].parameters() if p.dim() == 2]),
    torch.optim.AdamW(
        [p for p in model[:-1].parameters() if p.dim() < 2] + list(model[-1].parameters()), lr=3e-3
    ),
)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(50):
    idx = torch.randint(0, 400, (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for one in optimizer.optimizers:
        scaler.step(one)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
