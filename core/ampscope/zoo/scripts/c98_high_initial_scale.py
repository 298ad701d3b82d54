"""Speech-feature regression with a generous initial loss scale."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class FeatureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(20, 64)
        self.hid = nn.Linear(64, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(torch.relu(self.hid(torch.relu(self.inp(x)))))


net = FeatureNet().to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device, init_scale=2.0**24)
mixing = torch.randn(20, 10) / 3

for step in range(60):
    x = torch.randn(64, 20)
    y = 3.0 * torch.tanh(x @ mixing)
    x, y = x.to(device), y.to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), y)
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < before:
        print(f"Gradient overflow. Skipping step, reducing loss scale to {scaler.get_scale():g}")
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
