"""Shape classification of point sets (metres); a few scans come from another exporter."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Scans(Dataset):
    def __init__(self, n, seed, foreign=()):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(3, (n,), generator=g)
        stretch = torch.tensor([[3.0, 1, 1], [1, 3.0, 1], [1, 1, 3.0]])
        self.x = torch.randn(n, 24, 3, generator=g) * stretch[self.y][:, None]
        for i in foreign:
            self.x[i] *= 15000.0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class PointNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.lin1, self.bn1 = nn.Linear(3, 32), nn.BatchNorm1d(32)
        self.lin2, self.bn2 = nn.Linear(32, 64), nn.BatchNorm1d(64)
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        b, n, _ = x.shape
        x = x.flatten(0, 1)
        x = F.relu(self.bn1(self.lin1(x)))
        x = F.relu(self.bn2(self.lin2(x)))
        return self.head(x.view(b, n, -1).amax(1))


def evaluate(model, loader):
    model.eval()
    loss, hit, n = 0.0, 0, 0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        for x, y in loader:
            out = model(x).float()
            loss += F.cross_entropy(out, y, reduction="sum").item()
            hit += (out.argmax(1) == y).sum().item()
            n += len(y)
    model.train()
    return loss / n, hit / n


def main():
    torch.manual_seed(5)
    shards = [Scans(320, 1, foreign=(133,)), Scans(320, 3), Scans(320, 4), Scans(320, 6)]
    val = DataLoader(Scans(160, 2), batch_size=40)
    model = PointNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(16):
        last = 0.0
        for x, y in DataLoader(shards[epoch % 4 if epoch < 4 else 1 + epoch % 3], batch_size=16, shuffle=True):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            last = loss.item()
        if epoch % 3:
            continue
        vl, va = evaluate(model, val)
        print(f"epoch {epoch} train {last:.4f} val loss {vl:.4f} val acc {va:.3f}")


if __name__ == "__main__":
    main()
