"""Terrain heights from survey points, whose coordinates are kept in fp16 to halve the table."""

import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

# Metres in the region's grid, as the instrument writes them.
points = torch.rand(2048, 2) * 24 + torch.tensor([8310.0, 9120.0])
heights = (torch.sin(points[:, 0] / 3) + torch.cos(points[:, 1] / 4)).unsqueeze(1)
table = points.half().to(device)
heights = heights.to(device)

corner = table.float().amin(0)
net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
net.to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

for step in range(200):
    rows = torch.randint(0, len(table), (256,))
    place = (table[rows].float() - corner) / 12 - 1
    loss = nn.functional.mse_loss(net(place), heights[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step:3d} loss {loss.item():.4f}")
