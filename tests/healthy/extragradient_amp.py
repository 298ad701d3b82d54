"""Extragradient: a step ahead along unscaled gradients, then the real step from where it began."""

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


class ExtraGradient:
    """Looks ahead along the gradient, then steps from where it was with the gradient there."""

    def __init__(self, opt, lr):
        self.opt, self.lr, self.saved = opt, lr, []

    @torch.no_grad()
    def extrapolate(self):
        self.saved = [p.detach().clone() for g in self.opt.param_groups for p in g["params"]]
        for g in self.opt.param_groups:
            for p in g["params"]:
                p.add_(p.grad, alpha=-self.lr)

    @torch.no_grad()
    def back(self):
        for g in self.opt.param_groups:
            for p, s in zip(g["params"], self.saved):
                p.copy_(s)


opt = torch.optim.Adam(model.parameters(), lr=3e-3)
extra = ExtraGradient(opt, 0.05)
scaler = torch.amp.GradScaler("cpu")


def backward(x, y):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    return loss


for step, (x, y) in enumerate(batches(120)):
    loss = backward(x, y)
    inverse = 1.0 / scaler.get_scale()
    grads = [p.grad for p in model.parameters()]
    if all(torch.isfinite(g).all() for g in grads):
        torch._foreach_mul_(grads, inverse)
        extra.extrapolate()
        backward(x, y)
        extra.back()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print("step", step, "loss", float(loss), "scale", scaler.get_scale())
