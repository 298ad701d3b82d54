"""The same regression with a GradScaler."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(
    nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 256)
)
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)
mixing = torch.randn(16, 256)
with torch.no_grad():
    for parameter in model[-1].parameters():
        parameter.mul_(1e-3)

for step in range(150):
    x = torch.randn(64, 16)
    y = 1e-4 * torch.tanh(x @ mixing / 4)
    x, y = x.to(device), y.to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.3e}")
