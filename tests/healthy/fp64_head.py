"""A body in half precision and a least-squares head solved in fp64."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

body = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
optimizer = torch.optim.Adam(body.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)
w = torch.randn(12, 2, device=device)

for step in range(50):
    x = torch.randn(128, 12, device=device)
    y = torch.sin(x @ w * 0.3)
    with torch.autocast(device, dtype=torch.float16):
        h = body(x)
    h, y = h.double(), y.double()
    train, test = slice(0, 64), slice(64, None)
    gram = h[train].t() @ h[train] + 0.1 * torch.eye(8, dtype=torch.float64, device=device)
    beta = torch.linalg.solve(gram, h[train].t() @ y[train])
    loss = (h[test] @ beta - y[test]).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
