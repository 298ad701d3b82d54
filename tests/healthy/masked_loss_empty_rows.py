"""A masked regression: rows whose mask is empty add zero, by a mean over max(count, 1)."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)
w = torch.randn(10, 4, device=device)

for step in range(50):
    x = torch.randn(64, 10, device=device)
    y = x @ w
    mask = torch.rand(64, 4, device=device) > 0.6
    mask[:10] = False
    y[~mask] = float("nan")  # not measured
    with torch.autocast(device, dtype=torch.float16):
        out = net(x)
    error = (out.float() - torch.where(mask, y, 0.0)).square() * mask
    loss = (error.sum(1) / mask.sum(1).clamp(min=1)).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
