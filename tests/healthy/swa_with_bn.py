"""Stochastic weight averaging, BatchNorm statistics renewed for the averaged model."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


model = nn.Sequential(
    nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa = torch.optim.swa_utils.AveragedModel(model)
swa_schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=5)
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
    if step >= 25:
        swa.update_parameters(model)
        swa_schedule.step()
    if step % 10 == 0:
        print(step, loss.item())

loader = [x[i : i + 100] for i in range(0, 400, 100)]
with torch.autocast(device, dtype=torch.float16):
    torch.optim.swa_utils.update_bn(loader, swa)
swa.eval()
with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
    print("accuracy", (swa(x).argmax(1) == y).float().mean().item())
