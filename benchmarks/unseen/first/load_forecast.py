"""Day-ahead electricity load forecast in MW."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class LoadWindows(Dataset):
    def __init__(self, days=400, seed=30):
        g = torch.Generator().manual_seed(seed)
        h = torch.arange(days * 24, dtype=torch.float32)
        daily = 700 * torch.sin(2 * torch.pi * h / 24)
        weekly = 400 * torch.sin(2 * torch.pi * h / 168)
        self.series = 4200 + daily + weekly + 60 * torch.randn(len(h), generator=g)

    def __len__(self):
        return len(self.series) // 24 - 3

    def __getitem__(self, d):
        past = self.series[24 * d : 24 * (d + 2)]
        return (past - 4200) / 800, self.series[24 * (d + 2) : 24 * (d + 3)]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.Linear(64, 24)

    def forward(self, x):
        return self.heads(self.trunk(x))


def epoch(model, loader, opt, scaler, criterion):
    total = 0.0
    for past, target in loader:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(past), target)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        total += loss.item()
    return total / len(loader.dataset)


if __name__ == "__main__":
    torch.manual_seed(8)
    loader = DataLoader(LoadWindows(), batch_size=64, shuffle=True, drop_last=True)
    model = Forecaster()
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.MSELoss(reduction="sum")
    for e in range(10):
        print(f"epoch {e} loss/sample {epoch(model, loader, opt, scaler, criterion):.1f} scale {scaler.get_scale():g}")
