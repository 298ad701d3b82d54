"""Evaluation whose model returns distances, infinite for padding; training never sees them."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x, gallery=None, padding=None):
        z = self.net(x)
        if gallery is None:
            return z
        d = torch.cdist(z.float(), gallery)
        d[:, padding] = float("inf")
        return d


net = Retrieval().to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)
w = torch.randn(12, 8, device=device)

for step in range(50):
    x = torch.randn(64, 12, device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.mse_loss(net(x).float(), (x @ w).tanh())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())

net.eval()
with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
    gallery = net(torch.randn(30, 12, device=device)).float()
    d = net(torch.randn(16, 12, device=device), gallery, torch.arange(25, 30, device=device))
print(d.argmin(1).tolist())
