"""Two-moons classifier with clipping, warm-up and a cosine schedule."""

import math

import torch
import torch.nn as nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(2)


def two_moons(n):
    angle = math.pi * torch.rand(n)
    label = torch.randint(0, 2, (n,))
    x = torch.where(label == 0, angle.cos(), 1.0 - angle.cos())
    y = torch.where(label == 0, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], dim=1) + 0.1 * torch.randn(n, 2), label


net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
net = net.to(device)
steps = 60
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, nesterov=True)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - 5)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
scaler = torch.amp.GradScaler(device, init_scale=2.0**24)

for step in range(steps):
    x, y = two_moons(128)
    x, y = x.to(device), y.to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if step % 10 == 0:
        lr = schedule.get_last_lr()[0]
        print(f"step {step}: loss {loss.item():.4f} norm {norm.item():.3f} lr {lr:.4f}")
