"""Forecast from sensors with missing readings stored as NaN."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Readings(Dataset):
    def __init__(self, n=1200, seed=70):
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(n, 4, generator=g)
        lift = torch.randn(4, 12, generator=g)
        x = z @ lift + 0.1 * torch.randn(n, 12, generator=g)
        self.y = torch.tanh(z[:, :1] + z[:, 1:2])
        x[torch.rand(n, 12, generator=g) < 0.15] = float("nan")
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Imputing(nn.Module):
    def __init__(self, n, hidden=64):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(n))
        self.net = nn.Sequential(nn.Linear(2 * n, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        present = ~torch.isnan(x)
        x = torch.where(present, torch.nan_to_num(x), self.fill)
        return self.net(torch.cat([x, present.to(x.dtype)], dim=1))


def main():
    torch.manual_seed(7)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Imputing(12).to(device)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler(device)
    loader = DataLoader(Readings(), batch_size=40, shuffle=True)
    for epoch in range(5):
        total = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            opt.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            total += loss.item()
        print(f"epoch {epoch} mse {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
