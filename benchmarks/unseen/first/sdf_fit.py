"""Fit a signed distance field to surface samples with an eikonal term."""
import argparse

import torch
import torch.nn as nn


class SDF(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, p):
        return self.net(p).squeeze(-1)


def surface(n):
    theta = 2 * torch.pi * torch.rand(n)
    return 0.6 * torch.stack([theta.cos(), theta.sin()], dim=1)


def eikonal(model, scaler, points):
    points = points.requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.float16):
        sdf = model(points)
    grad, = torch.autograd.grad(scaler.scale(sdf.float().sum()), points, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--weight", type=float, default=0.3)
    args = parser.parse_args()
    torch.manual_seed(33)
    model = SDF()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(args.steps):
        opt.zero_grad(set_to_none=True)
        on, off = surface(48), 2 * torch.rand(48, 2) - 1
        with torch.autocast("cpu", dtype=torch.float16):
            fit = model(on).abs().mean() + (model(off).float() - (off.norm(dim=1) - 0.6)).abs().mean()
        reg = eikonal(model, scaler, off)
        loss = fit + args.weight * reg
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 25 == 24:
            print(f"step {step + 1} fit {fit.item():.4f} eikonal {reg.item():.4f} scale {scaler.get_scale():g}")


main()
