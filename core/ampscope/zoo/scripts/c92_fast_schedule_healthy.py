"""Fit a small function with SGD; a short, aggressive schedule."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
model.to(device)
lr = 0.2
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
scaler = torch.amp.GradScaler(device)
mse = nn.MSELoss()
direction = torch.randn(8, 1)

for step in range(30):
    x = torch.randn(64, 8)
    y = torch.sin(x @ direction)
    x, y = x.to(device), y.to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = mse(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4g} scale {scaler.get_scale():.4g}")
