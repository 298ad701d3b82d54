"""Velocity diffusion on closed curves: zero-initialised modulation, teacher phase, then distilled student."""
import argparse
import copy
import math

import torch
from torch import nn
from torch.func import functional_call

from _schedule import Cosine


class ModBlock(nn.Module):
    def __init__(self, width, cond):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mod = nn.Linear(cond, 3 * width)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        nn.init.zeros_(self.mod.weight)
        nn.init.zeros_(self.mod.bias)

    def forward(self, h, c):
        shift, scale, gate = self.mod(c).chunk(3, -1)
        return h + gate * self.net(self.norm(h) * (1 + scale) + shift)


class Denoiser(nn.Module):
    def __init__(self, dim=16, width=64, cond=24, depth=3):
        super().__init__()
        self.cond_dim = cond
        self.cond = nn.Sequential(nn.Linear(cond, cond), nn.SiLU())
        self.inp = nn.Linear(dim, width)
        self.blocks = nn.ModuleList([ModBlock(width, cond) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, dim)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, emb):
        c = self.cond(emb)
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, c)
        return self.out(self.norm(h))


def curves(n, dim, g):
    k = dim // 2
    t = torch.arange(k) * (2 * math.pi / k)
    a, b = 0.5 + torch.rand(n, 1, generator=g), 0.5 + torch.rand(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    return torch.cat([a * torch.cos(t + phase), b * torch.sin(t + phase)], -1)


class Lab:
    def __init__(self, args):
        self.args = args
        self.g = torch.Generator().manual_seed(args.seed)
        self.plan = Cosine()
        self.teacher = Denoiser()
        self.ema = {k: v.detach().clone() for k, v in self.teacher.named_parameters()}

    def amp(self):
        return torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16)

    def batch(self):
        x = curves(self.args.batch, 16, self.g)
        level = torch.randint(self.plan.levels, (len(x),), generator=self.g)
        noisy, v = self.plan.corrupt(x, level)
        return noisy, v, level, self.plan.embed(level, self.teacher.cond_dim)

    def weighted(self, pred, target, level):
        per = (pred.float() - target.float()).pow(2).mean(-1)
        w = self.plan.weight[level]
        return torch.where(torch.isfinite(w), w * per, torch.zeros_like(per)).mean()

    def teacher_loss(self, net):
        noisy, v, level, emb = self.batch()
        with self.amp():
            pred = net(noisy, emb)
        return self.weighted(pred, v, level)

    def student_loss(self, net):
        noisy, v, level, emb = self.batch()
        with torch.no_grad(), self.amp():
            goal = functional_call(self.teacher, self.ema, (noisy, emb))
        with self.amp():
            pred = net(noisy, emb)
        return 0.7 * self.weighted(pred, goal, level) + 0.3 * self.weighted(pred, v, level)

    def train(self, name, net, steps, objective, ema=None):
        opt = torch.optim.AdamW(net.parameters(), lr=self.args.lr, betas=(0.9, 0.99), weight_decay=0.0)
        scaler = torch.amp.GradScaler("cpu", enabled=self.args.fp16)
        total = 0.0
        for i in range(steps):
            loss = objective(net)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            if ema is not None:
                with torch.no_grad():
                    for k, p in net.named_parameters():
                        ema[k].lerp_(p, 0.03)
            total += loss.item()
            if (i + 1) % 30 == 0:
                print(f"{name} {i + 1:4d}  loss {total / 30:.4f}", flush=True)
                total = 0.0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--teacher-steps", type=int, default=210)
    p.add_argument("--student-steps", type=int, default=150)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=51)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    lab = Lab(args)
    lab.train("teacher", lab.teacher, args.teacher_steps, lab.teacher_loss, lab.ema)
    student = Denoiser(width=40, depth=2)
    lab.train("student", student, args.student_steps, lab.student_loss)


if __name__ == "__main__":
    main()
