"""Noise with the norm of differential privacy, added after unscale_ and a clip per parameter."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(50):
    idx = torch.randint(0, 400, (50,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.mul_((0.5 / (p.grad.norm() + 1e-6)).clamp(max=1.0))
        p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
