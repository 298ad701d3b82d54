"""Predict a yearly salary; the output bias starts at the average of the training data."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class SalaryModel(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 1)
        nn.init.constant_(self.head.bias, mean)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


def people(n, gen):
    x = torch.randn(n, 9, generator=gen)
    pay = 41000 + 9000 * x[:, 0] + 6000 * x[:, 1] * (x[:, 2] > 0) + 7000 * x[:, 3].clamp(min=0).square()
    return x, pay


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--head-lr", type=float, default=5.0)
    args = p.parse_args()
    torch.manual_seed(61)
    gen = torch.Generator().manual_seed(610)
    _, sample = people(4000, gen)
    model = SalaryModel(sample.mean().item())
    groups = [{"params": model.body.parameters(), "lr": 2e-3}, {"params": model.head.parameters(), "lr": args.head_lr}]
    opt = torch.optim.Adam(groups)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(args.steps):
        x, pay = people(64, gen)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.smooth_l1_loss(model(x), pay)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 25 == 24:
            print(f"step {step + 1} mean error {loss.item():.0f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
