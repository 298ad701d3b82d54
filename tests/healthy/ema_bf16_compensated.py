"""An average of weights in bf16 that carries what rounding takes over to the next step."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
average = copy.deepcopy(model).to(torch.bfloat16).requires_grad_(False)
carried = [torch.zeros_like(p) for p in average.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(120):
    idx = torch.randint(0, 400, (50,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for a, p, c in zip(average.parameters(), model.parameters(), carried):
            c.add_(0.01 * (p - a.float()).to(c.dtype))
            before = a.clone()
            a.add_(c)
            c.sub_(a - before)
    if step % 20 == 0:
        with torch.no_grad():
            accuracy = (average(x.to(average[0].weight.dtype)).argmax(1) == y).float().mean()
        print(step, loss.item(), accuracy.item())
