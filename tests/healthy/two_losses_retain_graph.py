"""Two scaled losses over one graph, two backward passes, one unscale_, one step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

body = nn.Sequential(nn.Linear(20, 64), nn.ReLU()).to(device)
cls, reg = nn.Linear(64, 5).to(device), nn.Linear(64, 1).to(device)
params = [*body.parameters(), *cls.parameters(), *reg.parameters()]
optimizer = torch.optim.AdamW(params, lr=3e-3)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y, z = (x @ torch.randn(20, 5, device=device)).argmax(1), x[:, :1] * 2

for step in range(50):
    idx = torch.randint(0, 400, (50,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        h = body(x[idx])
        first, second = F.cross_entropy(cls(h), y[idx]), F.mse_loss(reg(h).float(), z[idx])
    optimizer.zero_grad()
    scaler.scale(first).backward(retain_graph=True)
    scaler.scale(second).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, first.item(), second.item())
