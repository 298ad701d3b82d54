"""Discrete-time survival model for subscription churn (hazard per month)."""
import argparse
import torch
from torch import nn

MONTHS = 10


class HazardNet(nn.Module):
    def __init__(self, features=6, width=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.hazard = nn.Linear(width, MONTHS)

    def forward(self, x):
        z = self.hazard(self.trunk(x))
        return torch.sigmoid(12 * torch.tanh(z / 12))


class SurvivalNLL(nn.Module):
    """Negative log-likelihood of the observed month under the hazards."""

    def forward(self, h, month, observed):
        grid = torch.arange(MONTHS, device=h.device)[None]
        before = (grid < month[:, None]).to(h.dtype)
        at = (grid == month[:, None]).to(h.dtype) * observed[:, None]
        survive = before * torch.log(1 - h)
        leave = at * torch.log(h.clamp(min=1e-4))
        return -(survive.float() + leave.float()).sum(1).mean()


def customers(n):
    x = torch.randn(n, 6)
    month = (4 + 2.2 * torch.tanh(x[:, 0]) + 1.5 * torch.tanh(x[:, 1])).round().long().clamp(0, MONTHS - 1)
    prepaid = torch.rand(n) < 0.3
    x[:, 5] = prepaid.float() * 4
    month[prepaid] = 3
    observed = (prepaid | (torch.rand(n) < 0.9)).float()
    return x, month, observed


def run(args):
    torch.manual_seed(args.seed)
    net, criterion = HazardNet(), SurvivalNLL()
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(args.steps):
        x, m, o = customers(args.batch)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(net(x), m, o)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 40 == 0 or step == args.steps - 1:
            print(f"{step:4d} nll {loss.item():.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=400)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--seed", type=int, default=4)
    run(ap.parse_args([]))
