"""Reptile: inner SGD under AMP on a copy, then the outer weights move towards it by hand."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

meta = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1)).to(device)
scaler = torch.amp.GradScaler(device, init_scale=2.0**12)

for outer in range(12):
    net = copy.deepcopy(meta)
    inner = torch.optim.SGD(net.parameters(), lr=0.02)
    amplitude, phase = torch.rand(2, device=device) + 0.5
    for step in range(5):
        x = torch.rand(20, 1, device=device) * 6 - 3
        with torch.autocast(device, dtype=torch.float16):
            loss = F.mse_loss(net(x).float(), amplitude * torch.sin(x + phase))
        inner.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(inner)
        scaler.update()
    with torch.no_grad():
        for p, q in zip(meta.parameters(), net.parameters()):
            p.add_(q - p, alpha=0.3)
    print(outer, loss.item())
