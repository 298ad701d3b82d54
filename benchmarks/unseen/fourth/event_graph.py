"""Temporal interaction graph: predict each account's activity score from its edge history."""
import argparse

import torch
from torch import nn


class Interactions:
    """Every account has a few thousand edges, oldest first. Habits change midway through the history."""

    def __init__(self, dim=6, edges=3600, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.dim, self.edges = dim, edges
        self.w = torch.randn(dim, generator=self.g) / dim ** 0.5

    def batch(self, accounts):
        old = torch.randn(accounts, self.edges * 3 // 4, self.dim, generator=self.g)
        style = 1.2 * torch.randn(accounts, 1, self.dim, generator=self.g)
        new = style + 0.7 * torch.randn(accounts, self.edges // 4, self.dim, generator=self.g)
        feat = torch.cat([old, new], 1)
        y = 3 * torch.tanh(feat @ self.w).mean(1)
        dst = torch.arange(accounts).repeat_interleave(feat.shape[1])
        return feat.flatten(0, 1), dst, y


class EdgeEncoder(nn.Module):
    def __init__(self, dim, width, floor=0.85):
        super().__init__()
        self.floor = floor
        self.inp = nn.Linear(dim, width)
        self.mid = nn.Linear(width, width)

    def forward(self, e):
        gate = torch.sigmoid(self.mid(torch.relu(self.inp(e))))
        return self.floor + (1 - self.floor) * gate


class Aggregate(nn.Module):
    """Mean of the incoming messages per node, taken one event at a time in order of arrival."""

    def forward(self, msg, dst, n):
        degree = torch.bincount(dst, minlength=n).clamp(min=1).float()
        total = msg.new_zeros(n, msg.shape[1])
        for event in msg.unflatten(0, (n, -1)).unbind(1):
            total = total + event
        return total / degree[:, None]


class GraphNet(nn.Module):
    def __init__(self, dim, width=12):
        super().__init__()
        self.edge = EdgeEncoder(dim, width)
        self.pool = Aggregate()
        self.head = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 1))
        self.shift = nn.Parameter(torch.full((width,), 0.92))
        self.gain = nn.Parameter(torch.full((width,), 50.0))

    def forward(self, edges, dst, n):
        h = self.pool(self.edge(edges), dst, n)
        return self.head((h - self.shift) * self.gain).squeeze(-1)


class EarlyStop:
    def __init__(self, patience):
        self.best, self.left, self.patience = float("inf"), patience, patience

    def __call__(self, value):
        if value < self.best - 1e-3:
            self.best, self.left = value, self.patience
        else:
            self.left -= 1
        return self.left <= 0


class Trainer:
    def __init__(self, args):
        self.args = args
        self.data = Interactions(edges=args.edges, seed=args.seed)
        self.model = GraphNet(self.data.dim)
        scales = [self.model.shift, self.model.gain]
        rest = [p for n, p in self.model.named_parameters() if n not in ("shift", "gain")]
        self.opt = torch.optim.Adam([{"params": scales, "lr": args.lr}, {"params": rest}], lr=args.lr)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, [args.lr, args.lr], total_steps=args.steps)
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.fp16, init_scale=2.0 ** 10)
        self.stop = EarlyStop(args.patience)

    def objective(self, edges, dst, y):
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16):
            pred = self.model(edges, dst, len(y))
        pred = pred.float()
        mse = nn.functional.mse_loss(pred, y)
        order = nn.functional.softplus(-(pred[:, None] - pred) * (y[:, None] - y).sign()).mean()
        return mse + 0.1 * order, mse

    def step(self):
        loss, mse = self.objective(*self.data.batch(self.args.accounts))
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.sched.step()
        return loss.item(), mse.item()

    def fit(self):
        a = b = 0.0
        for i in range(self.args.steps):
            loss, mse = self.step()
            a, b = a + loss, b + mse
            if (i + 1) % 10 == 0:
                print(f"step {i + 1:4d}  loss {a / 10:.4f}  mse {b / 10:.4f}", flush=True)
                if self.stop(b / 10):
                    break
                a = b = 0.0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=80)
    p.add_argument("--accounts", type=int, default=12)
    p.add_argument("--edges", type=int, default=3600)
    p.add_argument("--patience", type=int, default=10)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=17)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    Trainer(args).fit()


if __name__ == "__main__":
    main()
