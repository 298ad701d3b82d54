"""SimCLR: the diagonal of the similarities is filled with minus infinity before the softmax."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
scaler = torch.amp.GradScaler(device)

for step in range(50):
    x = torch.randn(64, 16, device=device)
    views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
    with torch.autocast(device, dtype=torch.float16):
        z = F.normalize(net(views), dim=1)
        sim = z @ z.t() / 0.1
        sim = sim.masked_fill(torch.eye(128, dtype=torch.bool, device=device), float("-inf"))
        target = (torch.arange(128, device=device) + 64) % 128
        loss = F.cross_entropy(sim, target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
