"""Hourly electricity load from calendar features and temperature."""
from dataclasses import dataclass
import torch
from torch import nn


@dataclass
class Run:
    hours: int = 24 * 365
    periods: tuple = (24.0, 168.0, 8760.0)
    harmonics: int = 2
    batch: int = 128
    steps: int = 300
    lr: float = 3e-3
    table_dtype: torch.dtype = torch.bfloat16


class Calendar(nn.Module):
    def __init__(self, run):
        super().__init__()
        t = torch.arange(run.hours, dtype=run.table_dtype)
        cols = []
        for p in run.periods:
            for k in range(1, run.harmonics + 1):
                arg = 2 * torch.pi * k * t / p
                cols += [arg.sin(), arg.cos()]
        self.register_buffer("table", torch.stack(cols, 1))

    def forward(self, hour):
        return self.table[hour]


class LoadModel(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.features = nn.ModuleDict({"calendar": Calendar(run), "temp": nn.Linear(1, 8)})
        width = 8 + 2 * run.harmonics * len(run.periods)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, hour, temp):
        f = torch.cat([self.features["calendar"](hour).float(), self.features["temp"](temp).float()], -1)
        return self.mlp(f).squeeze(-1)


class Meter:
    def __init__(self, run):
        self.h = torch.arange(run.hours)
        t = self.h.double()
        daily = torch.sin(2 * torch.pi * t / 24) + 0.5 * torch.cos(4 * torch.pi * t / 24)
        weekly = 0.4 * torch.sin(2 * torch.pi * t / 168)
        self.temp = (torch.cos(2 * torch.pi * t / 8760) + 0.3 * torch.randn(run.hours)).float()
        self.load = (daily + weekly).float() + 0.5 * self.temp + 0.1 * torch.randn(run.hours)

    def draw(self, n):
        i = torch.randint(0, len(self.h), (n,))
        return self.h[i], self.temp[i, None], self.load[i]


def main(run):
    torch.manual_seed(14)
    meter, model = Meter(run), LoadModel(run)
    opt = torch.optim.AdamW(model.parameters(), lr=run.lr)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=20)
    for i in range(run.steps):
        h, c, y = meter.draw(run.batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(h, c), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        warm.step()
        if i % 30 == 0 or i == run.steps - 1:
            print(f"step {i} mse {loss.item():.4f}")


main(Run())
