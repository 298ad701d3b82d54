"""Load forecasting for several sites: shared trunk, one read-out per site, fp16 autocast."""
import argparse

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from _series import Sites


class GRUish(nn.Module):
    """Minimal gated cell over linear maps, so that it follows autocast."""

    def __init__(self, n_in, width):
        super().__init__()
        self.inp = nn.Linear(n_in, 2 * width)
        self.rec = nn.Linear(width, 2 * width, bias=False)
        self.width = width

    def forward(self, seq):
        h = seq.new_zeros(seq.shape[0], self.width)
        for t in range(seq.shape[1]):
            z, c = (self.inp(seq[:, t]) + self.rec(h)).chunk(2, -1)
            z = torch.sigmoid(z)
            h = (1 - z) * h + z * torch.tanh(c)
        return h


class Forecaster(nn.Module):
    def __init__(self, n_sites, horizon, patch=8, width=32):
        super().__init__()
        self.patch = patch
        self.cell = GRUish(patch, width)
        self.mix = weight_norm(nn.Linear(width, width))
        self.readout = nn.ModuleList([nn.Linear(width, horizon) for _ in range(n_sites)])

    def forward(self, x, site):
        h = self.cell(x.unflatten(1, (-1, self.patch)))
        h = h + torch.tanh(self.mix(h))
        return self.readout[site](h)


def quantile_loss(pred, y, q=0.5):
    e = y - pred
    return torch.maximum(q * e, (q - 1) * e).mean()


class Meter:
    def __init__(self, n):
        self.sum, self.count = [0.0] * n, [0] * n

    def add(self, k, v):
        self.sum[k] += v
        self.count[k] += 1

    def flush(self):
        out = [s / max(c, 1) for s, c in zip(self.sum, self.count)]
        self.sum, self.count = [0.0] * len(out), [0] * len(out)
        return out


class Trainer:
    def __init__(self, args):
        self.args = args
        self.data = Sites(args.sites, seed=args.seed)
        self.model = Forecaster(args.sites, self.data.horizon)
        slow = [p for n, p in self.model.named_parameters() if not n.startswith("readout")]
        fast = list(self.model.readout.parameters())
        self.opt = torch.optim.SGD([{"params": slow, "lr": args.lr},
                                    {"params": fast, "lr": 2 * args.lr}], momentum=0.9)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, args.steps, eta_min=args.lr * 0.1)
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.fp16)
        self.meter = Meter(args.sites)

    def forward_loss(self, site, x, y):
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16):
            pred = self.model(x, site)
        pred = pred.float()
        return quantile_loss(pred, y) + 0.5 * nn.functional.mse_loss(pred, y)

    def limit(self, max_norm=1.0):
        self.scaler.unscale_(self.opt)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def run_round(self):
        self.opt.zero_grad(set_to_none=True)
        last = self.args.sites - 1
        for site, x, y in self.data.round(self.args.batch):
            loss = self.forward_loss(site, x, y)
            self.scaler.scale(loss).backward()
            self.limit(self.args.clip)
            if site == last:
                self.scaler.step(self.opt)
            self.scaler.update()
            self.meter.add(site, loss.item())
        self.sched.step()

    def fit(self):
        for i in range(self.args.steps):
            self.run_round()
            if (i + 1) % self.args.log == 0:
                per = self.meter.flush()
                print(f"round {i + 1:4d}  loss {sum(per) / len(per):.4f}  "
                      + " ".join(f"{v:.3f}" for v in per), flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=160)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--sites", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--clip", type=float, default=2.0)
    p.add_argument("--log", type=int, default=20)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=3)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    Trainer(args).fit()


if __name__ == "__main__":
    main()
