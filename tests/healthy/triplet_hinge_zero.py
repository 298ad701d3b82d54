"""A triplet loss that is exactly zero on most batches once the margin is met."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)
centres = torch.randn(4, 16, device=device) * 2

for step in range(60):
    a = torch.randint(0, 4, (32,), device=device)
    b = (a + torch.randint(1, 4, (32,), device=device)) % 4
    noise = lambda: 0.5 * torch.randn(32, 16, device=device)
    with torch.autocast(device, dtype=torch.float16):
        anchor, positive, negative = (
            net(centres[a] + noise()),
            net(centres[a] + noise()),
            net(centres[b] + noise()),
        )
        loss = F.triplet_margin_loss(anchor.float(), positive.float(), negative.float(), margin=0.5)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
