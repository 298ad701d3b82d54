"""A loss on complex spectra: the transform and its logarithm in fp32, outside autocast."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)
t = torch.arange(64, device=device) / 64

for step in range(60):
    f = torch.randint(1, 8, (64, 1), device=device)
    clean = torch.sin(2 * torch.pi * f * t)
    noisy = clean + 0.3 * torch.randn_like(clean)
    with torch.autocast(device, dtype=torch.float16):
        out = net(noisy)
    a, b = torch.fft.rfft(out.float()), torch.fft.rfft(clean)
    loss = (a - b).abs().mean() + F.l1_loss((a.abs() + 1e-3).log(), (b.abs() + 1e-3).log())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
