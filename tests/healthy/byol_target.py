"""BYOL: a target network moved by an average, no negative pairs, a loss between -2 and 0."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

online = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)).to(
    device
)
predictor = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)).to(
    device
)
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=3e-3)
scaler = torch.amp.GradScaler(device)

for step in range(50):
    x = torch.randn(64, 16, device=device)
    a, b = x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)
    with torch.autocast(device, dtype=torch.float16):
        p = predictor(online(a))
        with torch.no_grad():
            z = target(b)
        loss = -2 * F.cosine_similarity(p.float(), z.float(), dim=1).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for t, o in zip(target.parameters(), online.parameters()):
            t.lerp_(o, 0.01)
    if step % 10 == 0:
        print(step, loss.item())
