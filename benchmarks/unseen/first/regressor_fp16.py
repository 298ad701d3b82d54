"""fp16 regression with a fixed multiplier on the loss."""
import argparse

import torch
from torch import nn


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--loss-scale", type=float, default=float(2 ** 22))
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--iters", type=int, default=120)
    return p.parse_args()


class FixedScale:
    def __init__(self, value):
        self.value = value

    def backward(self, loss):
        (loss * self.value).backward()

    def unscale(self, params):
        for p in params:
            if p.grad is not None:
                p.grad.div_(self.value)


args = get_args()
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
amp = FixedScale(args.loss_scale)
w = torch.randn(12, 1)
for it in range(args.iters):
    x = torch.randn(64, 12)
    y = torch.tanh(x @ w / 3)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    amp.backward(loss)
    amp.unscale(model.parameters())
    optimizer.step()
    if it % 20 == 0:
        print(f"iter {it} mse {loss.item():.4f}")
