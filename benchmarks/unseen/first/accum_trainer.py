"""Trainer with gradient accumulation and gradient norm logging."""
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class TrainConfig:
    micro_batch: int = 16
    accumulate: int = 4
    updates: int = 40
    lr: float = 0.02
    hidden: list = field(default_factory=lambda: [64, 64])


class Trainer:
    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        self.opt = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)
        self.log = []

    def grad_norm(self):
        grads = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
        return torch.stack(grads).norm().item()

    def micro_step(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(self.model(x), y) / self.cfg.accumulate
        self.scaler.scale(loss).backward()
        return loss.item() * self.cfg.accumulate

    def fit(self, data):
        for i in range(self.cfg.updates * self.cfg.accumulate):
            loss = self.micro_step(*data(self.cfg.micro_batch))
            if i % self.cfg.accumulate == 0:
                self.scaler.unscale_(self.opt)
                self.log.append((loss, self.grad_norm()))
            if (i + 1) % self.cfg.accumulate == 0:
                self.scaler.step(self.opt)
                self.scaler.update()
                self.opt.zero_grad()
                if len(self.log) % 8 == 0:
                    print("update {:3d} loss {:.4g} grad norm {:.4g}".format(len(self.log), *self.log[-1]))


def main():
    cfg = TrainConfig()
    torch.manual_seed(71)
    sizes = [10, *cfg.hidden]
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], 2))
    mix = torch.randn(10, 2) / 3

    def data(n):
        x = torch.randn(n, 10)
        return x, torch.sin(x @ mix)

    Trainer(model, cfg).fit(data)


if __name__ == "__main__":
    main()
