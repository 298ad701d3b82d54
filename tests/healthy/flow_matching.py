"""Rectified flow: the velocity between noise and data, timesteps from a logit-normal."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(
    nn.Linear(9, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))

for step in range(60):
    x1 = (
        torch.randn(128, 8, device=device) * 0.1
        + torch.randint(0, 2, (128, 1), device=device) * 2
        - 1
    )
    x0 = torch.randn_like(x1)
    t = torch.randn(128, 1, device=device).sigmoid()
    xt = (1 - t) * x0 + t * x1
    with torch.autocast(device, dtype=torch.bfloat16):
        v = model(torch.cat([xt, t], 1))
        loss = F.mse_loss(v, (x1 - x0).to(v.dtype))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
