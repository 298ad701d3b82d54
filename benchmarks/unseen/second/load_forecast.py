import argparse
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class Clock(nn.Module):
    """Periodic features of the hour index."""

    def __init__(self, hours, periods=(24.0, 12.0, 168.0), dtype=torch.bfloat16):
        super().__init__()
        t = torch.arange(hours, dtype=dtype).unsqueeze(1)
        w = 2 * math.pi / torch.tensor(periods, dtype=dtype)
        self.register_buffer("table", torch.cat([torch.sin(t * w), torch.cos(t * w)], 1))

    def forward(self, hour):
        return self.table[hour]


class LoadModel(nn.Module):
    def __init__(self, hours, width=48):
        super().__init__()
        self.clock = Clock(hours)
        self.net = nn.Sequential(nn.Linear(7, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, hour, temperature):
        f = torch.cat([self.clock(hour).float(), temperature.unsqueeze(1)], 1)
        return self.net(f).squeeze(-1)


def demand(hour, temperature):
    day = torch.sin(2 * math.pi * hour / 24) + 0.4 * torch.cos(2 * math.pi * hour / 12)
    week = 0.5 * torch.cos(2 * math.pi * hour / 168)
    return day + week + 0.3 * temperature


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--hours", type=int, default=8760)
    ap.add_argument("--steps", type=int, default=400)
    args = ap.parse_args()
    torch.manual_seed(0)
    model = LoadModel(args.hours)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    total = 0.0
    for s in range(args.steps):
        hour = torch.randint(args.hours, (256,))
        temp = torch.randn(256)
        y = demand(hour.float(), temp) + 0.1 * torch.randn(256)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = model(hour, temp)
        loss = F.mse_loss(pred.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
        if (s + 1) % 50 == 0:
            print(f"step {s + 1} mse {total / 50:.4f}")
            total = 0.0


if __name__ == "__main__":
    main()
