"""A norm of large activations, compiled: its square overflows in eager fp16 and not when fused."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


net = nn.Sequential(nn.Linear(16, 64), Norm(), nn.Linear(64, 5)).to(device)
with torch.no_grad():
    net[0].weight.mul_(600)
groups = [{"params": net[0].parameters(), "lr": 1.0}, {"params": net[2].parameters(), "lr": 1e-2}]
optimizer = torch.optim.Adam(groups)
scaler = torch.amp.GradScaler(device)
x = torch.randn(256, 16, device=device)
y = (x @ torch.randn(16, 5, device=device)).argmax(1)
model = torch.compile(net)

for step in range(40):
    idx = torch.randint(0, 256, (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]).float(), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
