import math

import torch


def make_site(kind, length, g):
    t = torch.arange(length, dtype=torch.float32)
    day = torch.sin(2 * math.pi * t / 24 + kind)
    week = torch.cos(2 * math.pi * t / 168 * (1 + kind % 2))
    trend = (0.3 + 0.5 * kind) * torch.sin(2 * math.pi * t / (37 + 9 * kind))
    noise = 0.1 * torch.randn(length, generator=g)
    sign = 1.0 if kind % 2 == 0 else -1.0
    return sign * day + 0.5 * week + trend + noise


class Sites:
    def __init__(self, n_sites=4, length=3000, context=48, horizon=6, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.rows = [make_site(k, length, self.g) for k in range(n_sites)]
        self.context, self.horizon, self.n = context, horizon, n_sites

    def window(self, site, batch):
        s = self.rows[site]
        last = len(s) - self.context - self.horizon
        at = torch.randint(last, (batch,), generator=self.g)
        x = torch.stack([s[i:i + self.context] for i in at.tolist()])
        y = torch.stack([s[i + self.context:i + self.context + self.horizon] for i in at.tolist()])
        return x, y

    def round(self, batch):
        """One window per site; the trainer consumes a round as one optimizer step."""
        for k in range(self.n):
            yield (k, *self.window(k, batch))
