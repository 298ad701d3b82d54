"""Survival analysis over several clinics: Cox term plus concordance term, bf16 autocast."""
import argparse

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class Registry:
    """Each clinic reports patients in its own batches; follow-up length differs between clinics."""

    def __init__(self, n=3000, dim=16, clinics=6, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, dim, generator=self.g)
        w = torch.randn(dim, generator=self.g) / dim ** 0.5
        risk = 1.5 * (self.x @ w) + 0.7 * self.x[:, 0] * self.x[:, 1]
        life = torch.empty(n).exponential_(1.0, generator=self.g) * torch.exp(-risk)
        self.clinic = torch.randint(clinics, (n,), generator=self.g)
        follow = torch.tensor([2.0, 1.5, 1.0, 0.6, 3.0, 0.035])[self.clinic % 6]
        cut = follow * (0.5 + torch.rand(n, generator=self.g))
        self.time, self.event = torch.minimum(life, cut), life <= cut
        self.members = [(self.clinic == c).nonzero(as_tuple=True)[0] for c in range(clinics)]
        self.weight = torch.tensor([6.0, 6.0, 6.0, 6.0, 6.0, 1.0])[:clinics]

    def batch(self, size):
        c = int(torch.multinomial(self.weight, 1, generator=self.g))
        pool = self.members[c]
        pick = pool[torch.randint(len(pool), (size,), generator=self.g)]
        return self.x[pick], self.time[pick], self.event[pick], c


class Highway(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = weight_norm(nn.Linear(width, width))
        self.gate = nn.Linear(width, width)

    def forward(self, h):
        g = torch.sigmoid(self.gate(h) - 1)
        return g * torch.relu(self.lin(h)) + (1 - g) * h


class RiskNet(nn.Module):
    def __init__(self, dim=16, width=48, depth=2):
        super().__init__()
        self.stem = weight_norm(nn.Linear(dim, width))
        self.body = nn.Sequential(*[Highway(width) for _ in range(depth)])
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        return self.out(self.drop(self.body(torch.relu(self.stem(x))))).squeeze(-1)


def cox_terms(risk, time, event):
    order = time.argsort(descending=True)
    r, e = risk[order], event[order]
    at_risk = torch.logcumsumexp(r, 0)
    return (at_risk - r) * e


def concordance_terms(risk, time, event, slope=2.0):
    first = event[:, None] & (time[:, None] < time[None, :])
    gap = risk[:, None] - risk[None, :]
    return nn.functional.softplus(-slope * gap)[first]


def concordance_index(risk, time, event):
    first = event[:, None] & (time[:, None] < time[None, :])
    gap = risk[:, None] - risk[None, :]
    return ((gap > 0) & first).sum().item() / max(first.sum().item(), 1)


class Objective:
    def __init__(self, pair_weight, l2):
        self.pair_weight, self.l2 = pair_weight, l2

    def __call__(self, risk, time, event):
        risk = risk.float()
        partial = cox_terms(risk, time, event).sum() / event.sum()
        pairs = concordance_terms(risk, time, event)
        ranking = pairs.sum() / max(pairs.numel(), 1)
        return partial + self.pair_weight * ranking + self.l2 * risk.pow(2).mean()


class Fit:
    def __init__(self, args):
        self.args = args
        self.data = Registry(seed=args.seed)
        self.model = RiskNet()
        gains = [p for n, p in self.model.named_parameters() if n.endswith("original0")]
        ids = {id(p) for p in gains}
        others = [p for p in self.model.parameters() if id(p) not in ids]
        self.opt = torch.optim.AdamW([{"params": gains, "lr": args.lr / 2, "weight_decay": 0.0},
                                      {"params": others}], lr=args.lr, weight_decay=0.02)
        self.sched = torch.optim.lr_scheduler.LinearLR(self.opt, 0.1, 1.0, 20)
        self.objective = Objective(args.pair_weight, 1e-3)

    def amp(self):
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.args.amp)

    def step(self):
        x, time, event, _ = self.data.batch(self.args.batch)
        with self.amp():
            risk = self.model(x)
        loss = self.objective(risk, time, event)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.opt.step()
        self.sched.step()
        return loss.item()

    @torch.no_grad()
    def score(self):
        self.model.eval()
        with self.amp():
            risk = self.model(self.data.x[:800]).float()
        self.model.train()
        return concordance_index(risk, self.data.time[:800], self.data.event[:800])

    def run(self):
        total = 0.0
        for i in range(self.args.steps):
            total += self.step()
            if (i + 1) % 20 == 0:
                print(f"step {i + 1:4d}  loss {total / 20:.4f}  c-index {self.score():.3f}", flush=True)
                total = 0.0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=240)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--pair-weight", type=float, default=0.5)
    p.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=5)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    Fit(args).run()


if __name__ == "__main__":
    main()
