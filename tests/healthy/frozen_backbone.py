"""A frozen backbone in eval mode, a new head; half the parameters never get a gradient."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

backbone = nn.Sequential(
    nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
).to(device)
backbone.requires_grad_(False).eval()
head = nn.Linear(64, 5).to(device)
unused = nn.Linear(64, 3).to(device)
optimizer = torch.optim.AdamW(
    [*backbone.parameters(), *head.parameters(), *unused.parameters()], lr=1e-2
)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(50):
    idx = torch.randint(0, 400, (50,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        with torch.no_grad():
            h = backbone(x[idx])
        loss = F.cross_entropy(head(h), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
