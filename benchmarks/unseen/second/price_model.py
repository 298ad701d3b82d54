import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Orders(Dataset):
    def __init__(self, n=4096, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.amount = 5 + 95 * torch.rand(n, generator=g)
        self.quantity = torch.randint(1, 9, (n,), generator=g).float()
        returned = torch.rand(n, generator=g) < 0.02
        returned[:n // 2] = False
        self.quantity[returned] = 0.0
        self.other = torch.randn(n, 5, generator=g)
        self.target = 0.3 * self.amount.log() + 0.5 * self.other[:, 0] - 0.2 * self.other[:, 1].abs()

    def __len__(self):
        return len(self.amount)

    def __getitem__(self, i):
        unit = self.amount[i] / self.quantity[i]
        feats = torch.stack([self.amount[i] / 50, self.quantity[i] / 4, torch.log1p(unit)])
        return torch.cat([feats, self.other[i]]), self.target[i]


class Regressor(nn.Module):
    def __init__(self, fin=8, width=64, p=0.05):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(fin, width), nn.SiLU(), nn.Dropout(p), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def main():
    torch.manual_seed(0)
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Orders(), batch_size=64, shuffle=False)
    for epoch in range(2):
        total, seen = 0.0, 0
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.smooth_l1_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total, seen = total + loss.item(), seen + 1
            if i % 16 == 15:
                print(f"epoch {epoch} batch {i + 1} loss {total / seen:.4f}")


if __name__ == "__main__":
    main()
