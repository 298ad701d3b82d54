"""An exponential average of fp32 weights with a decay of 0.999, used for evaluation."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

import copy

model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
ema = copy.deepcopy(model).requires_grad_(False)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(50):
    idx = torch.randint(0, 400, (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        decay = min(0.999, (1 + step) / (10 + step))
        for e, p in zip(ema.parameters(), model.parameters()):
            e.lerp_(p, 1 - decay)
    if step % 10 == 0:
        print(step, loss.item())

with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
    print("accuracy", (ema(x).argmax(1) == y).float().mean().item())
