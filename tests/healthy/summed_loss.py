"""reduction="sum" over a large batch of patches: the loss is large, the search for the scale is long, all is well."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 48)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler(device, init_scale=2.0**24)
basis = torch.randn(6, 48, device=device)

for step in range(50):
    x = torch.randn(2048, 6, device=device) @ basis
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        out = model(x)
        loss = F.mse_loss(out, x, reduction="sum")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
