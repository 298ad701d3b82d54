"""MAML: inner gradients by autograd.grad(create_graph=True) in fp32, outer loss through the scaler."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)).to(
    device
)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)

for step in range(40):
    outer = 0.0
    optimizer.zero_grad()
    for task in range(4):
        amplitude, phase = torch.rand(2, device=device) * 3 + 0.5
        xs, xq = torch.rand(2, 20, 1, device=device) * 6 - 3
        ys, yq = amplitude * torch.sin(xs + phase), amplitude * torch.sin(xq + phase)
        weights = dict(net.named_parameters())
        with torch.autocast(device, dtype=torch.float16):
            inner = F.mse_loss(functional_call(net, weights, xs).float(), ys)
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {k: w - 0.05 * g for (k, w), g in zip(weights.items(), grads)}
        with torch.autocast(device, dtype=torch.float16):
            outer = outer + F.mse_loss(functional_call(net, adapted, xq).float(), yq) / 4
    scaler.scale(outer).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, outer.item())
