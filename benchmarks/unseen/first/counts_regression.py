"""Regression on raw event counts; hidden values are in the tens of thousands."""
import torch
from torch import nn
import torch.nn.functional as F


class CountNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(10, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(64, 1)
        self.peak = 0.0

    def forward(self, x):
        h = self.lift(x)
        for block in self.blocks:
            h = h + 300.0 * block(h)
        self.peak = max(self.peak, h.detach().abs().max().item())
        return self.out(self.norm(h)).squeeze(-1)


torch.manual_seed(8)
rate = 4000 * torch.rand(10) + 2000
model = CountNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
for step in range(120):
    x = torch.poisson(rate.expand(48, 10) * (0.5 + torch.rand(48, 1))) * 3
    y = torch.log(x.sum(1)) - 11
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 19:
        print(f"step {step + 1} loss {loss.item():.4f} peak {model.peak:.0f} scale {scaler.get_scale():g}")
