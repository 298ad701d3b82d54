"""unscale_, a finite check of one's own, optimizer.step, update: the step is not the scaler's."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(50):
    idx = torch.randint(0, 400, (50,), device=device)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    finite = all(torch.isfinite(p.grad).all() for p in model.parameters())
    if finite:
        optimizer.step()
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), finite)
