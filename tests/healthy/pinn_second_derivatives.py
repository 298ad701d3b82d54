"""A physics-informed network: second derivatives by autograd.grad of unscaled outputs, in fp32."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(
    device
)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)

for step in range(60):
    x = (torch.rand(64, 1, device=device) * 3).requires_grad_(True)
    with torch.autocast(device, dtype=torch.float16):
        u = net(x)
    u = u.float()
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    edge = torch.zeros(1, 1, device=device, requires_grad=True)
    with torch.autocast(device, enabled=False):
        at0 = net(edge)
        (d0,) = torch.autograd.grad(at0.sum(), edge, create_graph=True)
    loss = (ddu + u).square().mean() + at0.square().sum() + (d0 - 1).square().sum()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
