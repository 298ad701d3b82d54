"""A recurrent cell over Linear layers with truncated backpropagation and a carried state."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Cell(nn.Module):
    def __init__(self, i, h):
        super().__init__()
        self.gates, self.new = nn.Linear(i + h, 2 * h), nn.Linear(i + h, h)

    def forward(self, x, h):
        r, z = self.gates(torch.cat([x, h], 1)).sigmoid().chunk(2, 1)
        n = self.new(torch.cat([x, r * h], 1)).tanh()
        return z * h + (1 - z) * n


cell, head = Cell(4, 32).to(device), nn.Linear(32, 4).to(device)
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=5e-3)
scaler = torch.amp.GradScaler(device)
h = torch.zeros(16, 32, device=device)

for step in range(40):
    h = h.detach()
    phase = torch.arange(6, device=device) + 6 * step
    x = torch.stack([torch.sin(phase * f) for f in (0.3, 0.5, 0.7, 0.9)], 1).expand(16, -1, -1)
    loss = 0.0
    with torch.autocast(device, dtype=torch.float16):
        for t in range(5):
            h = cell(x[:, t], h).float()
            loss = loss + F.mse_loss(head(h).float(), x[:, t + 1]) / 5
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([*cell.parameters(), *head.parameters()], 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
