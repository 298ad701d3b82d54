import torch
import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self, n, dim=24):
        super().__init__()
        self.table = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, dim))
        nn.init.normal_(self.table.weight, std=0.3)

    def forward(self, ids):
        e = self.table(ids)
        return e + self.mlp(e)


class TwoTower(nn.Module):
    def __init__(self, users, items):
        super().__init__()
        self.user, self.item = Tower(users), Tower(items)
        self.legacy = nn.Linear(24, 24)
        for p in self.user.mlp.parameters():
            p.requires_grad_(False)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1)


def impressions(n, taste, genre, g):
    u = torch.randint(len(taste), (n,), generator=g)
    i = (torch.rand(n, generator=g) ** 3 * len(genre)).long()
    return u, i, (taste[u] == genre[i]).float()


def main(steps=250):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(4)
    taste = torch.randint(3, (120,), generator=g)
    genre = torch.randint(3, (800,), generator=g)
    model = TwoTower(120, 800)
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    for s in range(steps):
        u, i, y = impressions(256, taste, genre, g)
        with torch.autocast("cpu", dtype=torch.float16):
            logit = model(u, i)
        loss = F.binary_cross_entropy_with_logits(logit.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if s % 50 == 49:
            grad = model.item.table.weight.grad
            print(f"step {s + 1} loss {loss.item():.4f} rows touched {(grad.abs().sum(1) > 0).float().mean():.3f}")


if __name__ == "__main__":
    main()
