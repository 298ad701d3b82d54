"""The sigmoid moves into the loss, BCEWithLogitsLoss, which autocast runs in fp32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

points = torch.randn(512, 12)
labels = (points[:, 0] * points[:, 1] + points[:, 2] > 0).float()
model = nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 1), nn.Flatten(0))
model.to(device)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)

for step in range(60):
    chosen = torch.randint(0, 512, (64,))
    x, y = points[chosen].to(device), labels[chosen].to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
