"""Lazy modules: parameters and running statistics have no shape before the first batch."""

import torch
from torch import nn

m = nn.Sequential(
    nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1)
)
s = torch.amp.GradScaler("cpu", init_scale=1024.0)
o = None
for i in range(30):
    x = torch.randn(8, 1, 6, 6)
    with torch.autocast("cpu", torch.float16):
        y = m(x)
    loss = (y.float() - x.mean((1, 2, 3)).unsqueeze(1)).square().mean()
    if o is None:
        o = torch.optim.SGD(m.parameters(), lr=0.05)
    o.zero_grad()
    s.scale(loss).backward()
    s.step(o)
    s.update()
print(loss.item())
