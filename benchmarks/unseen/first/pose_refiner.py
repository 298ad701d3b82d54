"""Refine camera orientation with small residual rotations (6D representation)."""
import argparse

import torch
import torch.nn as nn


def rotation_from_6d(r):
    a, b = r[:, :3], r[:, 3:]
    x = a / a.norm(dim=1, keepdim=True)
    b = b - (x * b).sum(1, keepdim=True) * x
    y = b / b.norm(dim=1, keepdim=True)
    return torch.stack([x, y, torch.linalg.cross(x, y)], dim=1)


def rotation_from_axis_angle(v):
    angle = v.norm(dim=1)[:, None, None]
    k = v / v.norm(dim=1, keepdim=True)
    zero = torch.zeros_like(k[:, 0])
    skew = torch.stack(
        [zero, -k[:, 2], k[:, 1], k[:, 2], zero, -k[:, 0], -k[:, 1], k[:, 0], zero], dim=1
    ).view(-1, 3, 3)
    return torch.eye(3) + torch.sin(angle) * skew + (1 - torch.cos(angle)) * (skew @ skew)


def geodesic(a, b):
    rel = torch.bmm(a, b.transpose(1, 2))
    trace = rel.diagonal(dim1=1, dim2=2).sum(-1)
    return torch.acos(((trace - 1) / 2).clamp(-1, 1))


class Refiner(nn.Module):
    def __init__(self, n_in=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_in, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.head = nn.Linear(64, 6)
        nn.init.normal_(self.head.weight, std=0.05)
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, x):
        return rotation_from_6d(self.head(self.trunk(x)))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=70)
parser.add_argument("--max-angle", type=float, default=0.15)
opts = parser.parse_args()

torch.manual_seed(41)
lift = torch.randn(3, 24)
net = Refiner()
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(opts.steps):
    v = opts.max_angle * torch.randn(48, 3)
    x = (v / opts.max_angle) @ lift + 0.05 * torch.randn(48, 24)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = geodesic(net(x), rotation_from_axis_angle(v)).mean()
    adam.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(adam)
    scaler.update()
    if step % 20 == 0:
        print(f"step {step} angle error {loss.item():.4f} rad, scale {scaler.get_scale():g}")
