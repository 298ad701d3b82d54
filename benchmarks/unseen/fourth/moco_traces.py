"""Momentum contrast on sensor traces: fp32 student under autocast, half-size teacher and key queue."""
import argparse
import math

import torch
from torch import nn
import torch.nn.functional as F

from _momentum import KeyQueue, Shadow


class Traces:
    def __init__(self, kinds=24, length=48, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.length = length
        self.params = torch.rand(kinds, 2, generator=self.g)
        self.kinds = kinds

    def view(self, kind):
        n = len(kind)
        t = torch.arange(self.length) / self.length
        a, b = self.params[kind].unbind(-1)
        phase = 0.6 * torch.rand(n, 1, generator=self.g)
        x = torch.sin(2 * math.pi * ((1 + 5 * a[:, None]) * t + phase)) * torch.exp(-3 * b[:, None] * t)
        x = (0.7 + 0.6 * torch.rand(n, 1, generator=self.g)) * x + 0.1 * torch.randn(n, self.length, generator=self.g)
        dead = torch.rand(n, 1, generator=self.g) < 0.02
        return x.masked_fill(dead, 0.0).unsqueeze(1)

    def pair(self, n):
        kind = torch.randint(self.kinds, (n,), generator=self.g)
        return self.view(kind), self.view(kind), kind


class Net(nn.Module):
    def __init__(self, width=24, out=16):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(1, width, 7, 2, 3), nn.Conv1d(width, width, 5, 2, 2)
        self.norm = nn.GroupNorm(4, width, eps=1e-3)
        self.head = nn.Sequential(nn.Linear(2 * width, 48), nn.ReLU(), nn.Linear(48, out))

    def forward(self, x):
        h = torch.relu(self.norm(self.c2(torch.relu(self.c1(x)))))
        return self.head(torch.cat([h.mean(-1), h.amax(-1)], -1))


class Moco:
    def __init__(self, args):
        self.args = args
        self.data = Traces(seed=args.seed)
        self.net = Net()
        half = torch.float16 if args.fp16 else torch.float32
        self.shadow = Shadow(self.net, Net(), args.momentum, half)
        self.queue = KeyQueue(256, 16, half)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.fp16)

    def amp(self):
        return torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16)

    def logits(self, q, k, kind):
        pos = (q * k).sum(-1, keepdim=True)
        neg = q @ self.queue.keys.float().T
        same = self.labels[None] == kind[:, None]
        neg = neg.masked_fill(same, float("-inf"))
        return torch.cat([pos, neg], -1) / self.args.tau

    def step(self):
        a, b, kind = self.data.pair(self.args.batch)
        if not hasattr(self, "labels"):
            self.labels = torch.full((len(self.queue.keys),), -1)
        with self.amp():
            q = self.net(a)
        q = F.normalize(q.float(), dim=-1, eps=1e-6)
        k = self.shadow(b)
        loss = F.cross_entropy(self.logits(q, k, kind), torch.zeros(len(q), dtype=torch.long))
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        limit = self.args.clip * (self.scaler.get_scale() if self.args.fp16 else 1.0)
        nn.utils.clip_grad_norm_(self.net.parameters(), limit)
        self.scaler.step(self.opt)
        self.scaler.update()
        idx = (torch.arange(len(k)) + self.queue.at) % len(self.labels)
        self.labels[idx] = kind
        self.queue.push(k)
        self.shadow.update(self.net)
        return loss.item()

    @torch.no_grad()
    def probe(self):
        kind = torch.arange(self.data.kinds).repeat(4)
        a, b = self.shadow(self.data.view(kind)), self.shadow(self.data.view(kind))
        return (kind[(a @ b.T).argmax(1)] == kind).float().mean().item()

    def fit(self):
        total = 0.0
        for i in range(self.args.steps):
            for g in self.opt.param_groups:
                g["lr"] = self.args.lr * min(1.0, (i + 1) / 30)
            total += self.step()
            if (i + 1) % 30 == 0:
                print(f"step {i + 1:4d}  loss {total / 30:.4f}  teacher match {self.probe():.3f}", flush=True)
                total = 0.0


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--tau", type=float, default=0.2)
    p.add_argument("--momentum", type=float, default=0.99)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=41)
    a = p.parse_args()
    torch.manual_seed(a.seed)
    torch.set_num_threads(1)
    Moco(a).fit()
