"""Lookahead around SGD, stepped by the scaler, with a clip of unscaled gradients."""

import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
x_all = torch.randn(512, 16)
y_all = teacher(x_all).argmax(1)


def batches(n):
    g = torch.Generator().manual_seed(1)
    for _ in range(n):
        i = torch.randint(0, 512, (32,), generator=g)
        yield x_all[i], y_all[i]


def net():
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


model = net()


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, k=5, alpha=0.5):
        self.base, self.k, self.alpha, self.n = base, k, alpha, 0
        super().__init__(base.param_groups, {})
        self.slow = [p.detach().clone() for g in base.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.n += 1
        if self.n % self.k == 0:
            for slow, p in zip(self.slow, (p for g in self.base.param_groups for p in g["params"])):
                slow.lerp_(p, self.alpha)
                p.copy_(slow)


opt = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
scaler = torch.amp.GradScaler("cpu")
for step, (x, y) in enumerate(batches(120)):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print("step", step, "loss", float(loss), "scale", scaler.get_scale())
