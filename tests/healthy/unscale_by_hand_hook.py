"""Gradients are divided by a hook on every parameter as they arrive; the steps are direct."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
for p in model.parameters():
    p.register_hook(lambda g: g / scaler.get_scale())
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(50):
    idx = torch.randint(0, 400, (50,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
