"""A RealNVP: couplings under autocast, log determinants and the density in fp32."""

import math

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 4))
        nn.init.zeros_(self.net[-1].weight), nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).float().chunk(2, 1)
        s = s.tanh()
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], 1), s.sum(1)


flow = nn.ModuleList(Coupling(i % 2 == 1) for i in range(4)).to(device)
optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)
mix = torch.randn(4, 4, device=device)

for step in range(60):
    x = (torch.randn(256, 4, device=device) @ mix).tanh() + 0.1 * torch.randn(256, 4, device=device)
    log_det = 0.0
    with torch.autocast(device, dtype=torch.float16):
        for layer in flow:
            x, ld = layer(x)
            log_det = log_det + ld
    log_p = -0.5 * (x.square() + math.log(2 * math.pi)).sum(1)
    loss = -(log_p + log_det).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
