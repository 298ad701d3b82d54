"""Water level at a harbour from time stamps: harmonics of known periods, a small network, bf16."""
import math

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(21)
PERIODS = (37.0, 61.0, 745.0)  # minutes: seiches and the tide


def readings(n, gen):
    """Minutes since the gauge was set up, weekday, and pressure at its foot in hectopascal."""
    timestamps = torch.randint(20_000, 60_000, (n,), generator=gen).float()
    weekday = (timestamps // 1440) % 7
    wave = sum(a * torch.sin(2 * math.pi * timestamps / p) for a, p in zip((2.0, 1.5, 1.0), PERIODS))
    pressure = 1213.0 + wave + 0.3 * (weekday > 4) + 0.1 * torch.randn(n, generator=gen)
    return timestamps, weekday, pressure


def features(timestamps, weekday):
    columns = [(weekday - 3) / 3]
    for period in PERIODS:
        angle = 2 * math.pi * (timestamps % period) / period
        columns += [angle.sin(), angle.cos()]
    return torch.stack(columns, dim=1)


gen = torch.Generator().manual_seed(21)
timestamps, weekday, pressure = readings(3000, gen)
test_stamps, test_weekday, test_pressure = readings(1000, gen)
inputs = features(timestamps, weekday)
anomaly = pressure - 1213.0
target = anomaly / 2.0

net = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(160):
    pick = torch.randint(3000, (128,), generator=gen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(inputs[pick]).squeeze(-1)
    loss = (out.float() - target[pick]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    level = net(features(test_stamps, test_weekday)).squeeze(-1) * 2.0 + 1213.0
    error = (level - test_pressure).square().mean()
print(f"test loss {error.item() / 4:.4f}")
print(f"test rmse {error.sqrt().item():.4f} hPa")
