"""Pairwise ranking: a user's clicked items against unclicked ones of the same session."""
import torch
from torch import nn
import torch.nn.functional as F


class Scorer(nn.Module):
    def __init__(self, users=80, items=150, d=24):
        super().__init__()
        self.user, self.item = nn.Embedding(users, d), nn.Embedding(items, d)
        self.mlp = nn.Sequential(nn.Linear(3 * d, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, u, i):
        a, b = self.user(u)[:, None].expand(-1, i.size(1), -1), self.item(i)
        return self.mlp(torch.cat([a, b, a * b], -1)).squeeze(-1)


class PairRank(nn.Module):
    """Averages log-sigmoid margins over the (clicked, unclicked) pairs of every session."""

    def forward(self, s, click):
        margin = s.unsqueeze(2) - s.unsqueeze(1)
        pair = click.unsqueeze(2) * (1 - click.unsqueeze(1))
        per_session = -(F.logsigmoid(margin.float()) * pair).sum((1, 2)) / pair.sum((1, 2))
        return per_session.mean()


class Log:
    def __init__(self, seed=23):
        self.g = torch.Generator().manual_seed(seed)
        self.u = torch.randn(80, 4, generator=self.g)
        self.i = torch.randn(150, 4, generator=self.g)

    def day(self, sessions, slots=10, shift=0.0):
        u = torch.randint(0, 80, (sessions,), generator=self.g)
        i = torch.randint(0, 150, (sessions, slots), generator=self.g)
        p = torch.sigmoid(1.5 * torch.einsum("sd,skd->sk", self.u[u], self.i[i]) - shift)
        click = (torch.rand(p.shape, generator=self.g) < p).float()
        click[:, 0], click[:, 1] = 1.0, 0.0
        if shift:
            quiet = torch.rand(sessions, generator=self.g) < 0.02
            click[quiet] = 0.0
        return u, i, click


def main():
    torch.manual_seed(23)
    log, model, crit = Log(), Scorer(), PairRank()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.15)
    step = 0
    for day in range(6):
        u, i, c = log.day(40 * 32, shift=0.0 if day < 2 else 0.5)
        losses = []
        for k in range(0, len(u), 32):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = crit(model(u[k:k + 32], i[k:k + 32]), c[k:k + 32])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
            step += 1
        print(f"day {day} step {step} rank loss {sum(losses) / len(losses):.4f}")


main()
