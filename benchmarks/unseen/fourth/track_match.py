"""Metric learning for audio fingerprints: triplet loss, hard-negative bank, bfloat16 autocast."""
import argparse
import contextlib

import torch
from torch import nn

from _miner import ClipLibrary, Miner


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=180)
    p.add_argument("--warmup", type=int, default=60)
    p.add_argument("--batch", type=int, default=24)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--margin", type=float, default=0.6)
    p.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    p.add_argument("--seed", type=int, default=8)
    return p.parse_args()


class GatedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        v, g = self.value(self.norm(x)).chunk(2, dim=-1)
        return x + self.out(v * torch.sigmoid(g))


class Encoder(nn.Module):
    def __init__(self, dim=48, width=96, out=24, depth=3):
        super().__init__()
        self.stem = nn.Linear(dim, width)
        self.blocks = nn.ModuleList([GatedBlock(width) for _ in range(depth)])
        self.head = nn.Linear(width, out)

    def forward(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = b(h)
        return self.head(h)


def euclid(u, v):
    diff = u.float() - v.float()
    return diff.pow(2).sum(-1).sqrt()


def spread_penalty(z):
    z = z.float()
    std = (z.var(0) + 1e-4).sqrt()
    return torch.relu(1.0 - std).mean()


class Callback:
    def on_step(self, trainer, step, loss):
        pass


class Log(Callback):
    def __init__(self, every):
        self.every, self.window = every, []

    def on_step(self, trainer, step, loss):
        self.window.append(loss)
        if (step + 1) % self.every == 0:
            print(f"step {step + 1:4d}  loss {sum(self.window) / len(self.window):.4f}  "
                  f"recall {trainer.recall():.3f}", flush=True)
            self.window = []


class WarmLr(Callback):
    def __init__(self, opt, steps):
        self.opt, self.steps = opt, steps
        self.base = [g["lr"] for g in opt.param_groups]

    def on_step(self, trainer, step, loss):
        f = min(1.0, (step + 2) / self.steps)
        for g, b in zip(self.opt.param_groups, self.base):
            g["lr"] = b * f


class Trainer:
    def __init__(self, args):
        self.args = args
        self.data = ClipLibrary(seed=args.seed)
        self.gen = torch.Generator().manual_seed(args.seed + 1)
        self.model = Encoder()
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim <= 1]
        self.opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01},
                                      {"params": rest, "weight_decay": 0.0}], lr=args.lr)
        self.miner = Miner()
        self.callbacks = [WarmLr(self.opt, 30), Log(20)]

    def amp(self):
        if self.args.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def step(self, i):
        a, p, n = self.data.triplets(self.args.batch, self.gen)
        if i >= self.args.warmup:
            n = self.miner.refill(n, 0.25, self.gen)
        with self.amp():
            za, zp, zn = self.model(torch.cat([a, p, n])).chunk(3)
        d_ap, d_an = euclid(za, zp), euclid(za, zn)
        triplet = torch.relu(self.args.margin + d_ap - d_an).mean()
        pull = 0.02 * d_ap.mean()
        loss = triplet + pull + 0.2 * spread_penalty(za)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.opt.step()
        self.miner.push(n, d_an)
        return loss.item()

    @torch.no_grad()
    def recall(self):
        with self.amp():
            q = self.model(self.data.takes[:, 2]).float()
            r = self.model(self.data.takes[:, 3]).float()
        near = torch.cdist(q, r).argmin(1)
        return (near == torch.arange(len(q))).float().mean().item()

    def fit(self):
        for i in range(self.args.steps):
            loss = self.step(i)
            for cb in self.callbacks:
                cb.on_step(self, i, loss)


if __name__ == "__main__":
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    Trainer(args).fit()
