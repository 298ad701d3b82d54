"""A curriculum: every 15 steps the task becomes harder and the loss jumps up tenfold."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

net = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 1)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)
w = torch.randn(8, 1, device=device)

for step in range(60):
    level = 4.0 ** (step // 15)
    x = torch.randn(128, 8, device=device)
    y = level * torch.sin(x @ w)
    with torch.autocast(device, dtype=torch.float16):
        out = net(x)
    loss = F.mse_loss(out.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 15 == 14:
        print(step, level, loss.item())
