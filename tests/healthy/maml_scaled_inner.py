"""First-order MAML whose inner loss is scaled too; its gradients are divided before use."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)

for step in range(40):
    optimizer.zero_grad()
    total = 0.0
    for task in range(4):
        amplitude, phase = torch.rand(2, device=device) * 3 + 0.5
        xs, xq = torch.rand(2, 20, 1, device=device) * 6 - 3
        ys, yq = amplitude * torch.sin(xs + phase), amplitude * torch.sin(xq + phase)
        weights = dict(net.named_parameters())
        with torch.autocast(device, dtype=torch.float16):
            inner = F.mse_loss(functional_call(net, weights, xs).float(), ys)
        scaled = torch.autograd.grad(scaler.scale(inner), list(weights.values()))
        inverse = 1.0 / scaler.get_scale()
        adapted = {k: w - 0.05 * g * inverse for (k, w), g in zip(weights.items(), scaled)}
        with torch.autocast(device, dtype=torch.float16):
            outer = F.mse_loss(functional_call(net, adapted, xq).float(), yq) / 4
        scaler.scale(outer).backward()
        total += outer.item()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, total)
