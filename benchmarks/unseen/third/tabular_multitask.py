"""Credit table: default probability plus a second head for recovery rate."""
import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader

torch.manual_seed(40)


class Tower(nn.Module):
    def __init__(self, i, o, w=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(i, w), nn.SiLU(), nn.Linear(w, o))

    def forward(self, x):
        return self.net(x).squeeze(-1)


class TwoTask(nn.Module):
    def __init__(self, cat_sizes=(12, 7), numeric=8):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(s, 4) for s in cat_sizes)
        self.shared = nn.Sequential(nn.Linear(numeric + 8, 48), nn.SiLU())
        self.towers = nn.ModuleDict({"default": Tower(48, 1), "recovery": Tower(48, 1)})

    def forward(self, num, cat):
        e = [m(cat[:, i]) for i, m in enumerate(self.emb)]
        h = self.shared(torch.cat([num, *e], dim=1))
        return {k: t(h) for k, t in self.towers.items()}


class Losses:
    def __init__(self):
        self.bce, self.mse = nn.BCEWithLogitsLoss(), nn.MSELoss()

    def __call__(self, out, default, recovery):
        return self.bce(out["default"], default), self.mse(out["recovery"], recovery)


n = 4096
num, cat = torch.randn(n, 8), torch.stack([torch.randint(0, 12, (n,)), torch.randint(0, 7, (n,))], 1)
risk = torch.randn(12)[cat[:, 0]] + num[:, 0] * num[:, 1] + num[:, 2]
default = (risk + 0.3 * torch.randn(n) > 0).float()
recovery = torch.sin(2 * num[:, 3]) + 0.5 * torch.randn(7)[cat[:, 1]] + num[:, 4]
loader = DataLoader(TensorDataset(num, cat, default, recovery), batch_size=64, shuffle=True)

model, criterion = TwoTask(), Losses()
opt = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)


def backward_all(terms):
    """Backpropagates the terms one after the other to keep the peak memory low."""
    last = len(terms) - 1
    for i, t in enumerate(terms):
        if i == 0:
            t = scaler.scale(t)
        t.backward(retain_graph=i < last)


for epoch in range(5):
    sums = torch.zeros(2)
    for a, b, d, r in loader:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            terms = criterion(model(a, b), d, r)
        backward_all(terms)
        scaler.step(opt)
        scaler.update()
        sums += torch.tensor([t.item() for t in terms])
    sums /= len(loader)
    print(f"epoch {epoch} default {sums[0]:.4f} recovery {sums[1]:.4f}")
