"""A whole compiled step in bf16: a sum that eager bf16 rounds away stays in fp32 when fused."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Offset(nn.Module):
    def forward(self, x):
        return torch.relu((x + 1000.0) - 1000.0)


net = nn.Sequential(nn.Linear(16, 64), Offset(), nn.Linear(64, 5)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
x = torch.randn(256, 16, device=device)
y = (x @ torch.randn(16, 5, device=device)).argmax(1)


@torch.compile
def train(x, y):
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


for step in range(40):
    idx = torch.randint(0, 256, (64,), device=device)
    loss = train(x[idx], y[idx])
    if step % 10 == 0:
        print(step, loss.item())
