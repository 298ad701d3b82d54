"""Sharpness-aware minimisation: unscale_ and update between the two backward passes of a step."""

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


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw))
        self.base = base(self.param_groups, **kw)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=True):
        ps = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in ps]).norm() + 1e-12
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                e = p.grad * (g["rho"] / norm)
                if not torch.isfinite(e).all():
                    e.zero_()
                p.add_(e)
                self.state[p]["e"] = e
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def restore(self):
        for g in self.param_groups:
            for p in g["params"]:
                if "e" in self.state[p]:
                    p.sub_(self.state[p].pop("e"))

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()


opt = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")


def loss_of(x, y):
    with torch.autocast("cpu", dtype=torch.float16):
        return F.cross_entropy(model(x).float(), y)


for step, (x, y) in enumerate(batches(120)):
    loss = loss_of(x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    opt.first_step()
    scaler.update()
    second = loss_of(x, y)
    scaler.scale(second).backward()
    opt.restore()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if step % 20 == 0:
        print("step", step, "loss", float(loss), "scale", scaler.get_scale())
