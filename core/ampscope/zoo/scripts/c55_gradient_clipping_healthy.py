"""Spiral classification with gradient clipping."""

import math

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

# three interleaved spirals
n_per_arm = 100
radius = torch.linspace(0.1, 1.0, n_per_arm)
points, labels = [], []
for arm in range(3):
    angle = radius * 3.0 + arm * 2 * math.pi / 3 + 0.1 * torch.randn(n_per_arm)
    points.append(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))
    labels.append(torch.full((n_per_arm,), arm))
X, Y = torch.cat(points).to(device), torch.cat(labels).to(device)

net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
net.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
scaler = torch.amp.GradScaler(device)

for step in range(60):
    optimizer.zero_grad()
    with torch.autocast(device_type=device, dtype=torch.float16):
        loss = criterion(net(X), Y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} grad norm {norm.item():.2f}")

with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
    accuracy = (net(X).argmax(1) == Y).float().mean()
print(f"train accuracy {accuracy.item():.3f}")
