"""Adaptive clipping by each row's weight norm, after unscale_, as NFNets do."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)


def agc(parameters, limit=0.05):
    for p in parameters:
        dims = tuple(range(1, p.dim())) or None
        w = p.detach().norm(dim=dims, keepdim=True).clamp(min=1e-3)
        g = p.grad.norm(dim=dims, keepdim=True).clamp(min=1e-6)
        p.grad.mul_((limit * w / g).clamp(max=1.0))


for step in range(50):
    idx = torch.randint(0, 400, (50,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    agc(model.parameters())
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
