"""Energy regression of small particle systems with learned position refinement."""
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader

MAX_N = 8


class Systems(Dataset):
    def __init__(self, n, full_until):
        g = torch.Generator().manual_seed(17)
        self.items = []
        for i in range(n):
            k = MAX_N if i < full_until else int(torch.randint(5, MAX_N, (1,), generator=g))
            pos, q, m = torch.zeros(MAX_N, 3), torch.zeros(MAX_N), torch.zeros(MAX_N)
            grid = torch.randperm(27, generator=g)[:k]
            pos[:k] = torch.stack([grid // 9, grid // 3 % 3, grid % 3], -1).float() + 0.3 * torch.rand(k, 3, generator=g) + 1
            q[:k] = torch.rand(k, generator=g) * 2 - 1
            m[:k] = 1
            d = torch.cdist(pos[:k], pos[:k]) + torch.eye(k) * 1e9
            e = (q[:k, None] * q[None, :k] / d).sum()
            self.items.append((pos, q, m, e))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Refine(nn.Module):
    def __init__(self, w=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, w), nn.SiLU(), nn.Linear(w, 3))

    def forward(self, pos, q, m):
        delta = self.net(torch.cat([pos, q.unsqueeze(-1)], -1)).float()
        return pos + 0.1 * torch.tanh(delta) * m.unsqueeze(-1)


class PairEnergy(nn.Module):
    def __init__(self, w=32):
        super().__init__()
        self.weight = nn.Sequential(nn.Linear(2, w), nn.SiLU(), nn.Linear(w, 1))

    def forward(self, pos, q, m):
        i, j = torch.triu_indices(MAX_N, MAX_N, offset=1)
        r2 = (pos[:, i] - pos[:, j]).pow(2).sum(-1)
        valid = (m[:, i] * m[:, j]) > 0
        inv = torch.where(valid, r2.reciprocal(), torch.zeros_like(r2))
        feats = torch.stack([q[:, i] * q[:, j], inv], -1)
        return (self.weight(feats).squeeze(-1).float() * valid).sum(-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.refine, self.energy = Refine(), PairEnergy()

    def forward(self, pos, q, m):
        return self.energy(self.refine(pos, q, m), q, m)


torch.manual_seed(0)
model = Model()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(Systems(1024, full_until=640), batch_size=16, shuffle=False)
step = 0
for epoch in range(3):
    for pos, q, m, e in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = model(pos, q, m)
        loss = nn.functional.smooth_l1_loss(pred, e)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 16 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        step += 1
