"""Regress log sale price from raw property records."""
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Settings:
    rows: int = 2048
    batch_size: int = 64
    epochs: int = 3
    lr: float = 3e-3
    seed: int = 3


def make_table(s: Settings):
    g = torch.Generator().manual_seed(s.seed)
    rooms = torch.randint(1, 9, (s.rows, 1), generator=g).float()
    year = 1900 + 120 * torch.rand(s.rows, 1, generator=g)
    living = 60 + 200 * torch.rand(s.rows, 1, generator=g)
    lot = torch.exp(7.5 + 1.6 * torch.randn(s.rows, 1, generator=g))
    tax = 1000 + 4000 * torch.rand(s.rows, 1, generator=g)
    x = torch.cat([rooms, year, living, lot, tax], dim=1)
    y = 10 + 0.05 * rooms + 0.004 * (year - 1960) + 0.003 * living + 0.1 * torch.log(lot)
    return x, y + 0.05 * torch.randn(s.rows, 1, generator=g)


def build():
    return nn.Sequential(
        nn.Linear(5, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 1),
    )


def run(s: Settings):
    torch.manual_seed(s.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = make_table(s)
    loader = DataLoader(TensorDataset(x, y - y.mean()), batch_size=s.batch_size, shuffle=True)
    net = build().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=s.lr)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(s.epochs):
        total = 0.0
        for xb, yb in loader:
            xb, yb = xb.to(device), yb.to(device)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                pred = net(xb)
                loss = nn.functional.mse_loss(pred, yb)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item() * len(xb)
        print(f"epoch {epoch}: mse {total / s.rows:.4f} scale {scaler.get_scale()}")


if __name__ == "__main__":
    run(Settings())
