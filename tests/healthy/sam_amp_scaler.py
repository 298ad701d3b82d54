"""Sharpness-aware minimisation with GradScaler: unscale_, climb, a second backward, unscale_, step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)
rho = 0.05


def loss_of(xb, yb):
    with torch.autocast(device, dtype=torch.float16):
        return F.cross_entropy(model(xb), yb)


for step in range(50):
    idx = torch.randint(0, 400, (50,), device=device)
    base.zero_grad()
    loss = loss_of(x[idx], y[idx])
    scaler.scale(loss).backward()
    scaler.unscale_(base)
    with torch.no_grad():
        norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        climbs = [p.grad * (rho / (norm + 1e-12)) for p in model.parameters()]
        for p, e in zip(model.parameters(), climbs):
            p.add_(e)
    scaler.update()
    base.zero_grad()
    scaler.scale(loss_of(x[idx], y[idx])).backward()
    with torch.no_grad():
        for p, e in zip(model.parameters(), climbs):
            p.sub_(e)
    scaler.step(base)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
