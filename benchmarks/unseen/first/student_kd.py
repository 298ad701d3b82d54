"""Knowledge distillation: hard labels plus soft targets from a frozen teacher."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(width):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))


def pretrain(net, data, steps=60):
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(steps):
        x, y = data(128, 0.0)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return net.eval().requires_grad_(False)


def distill(student, teacher, data, args):
    opt = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    t = args.temperature
    for step in range(args.steps):
        x, y = data(64, args.label_noise)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                soft = F.softmax(teacher(x).float() / t, dim=1)
            logits = student(x)
            hard_loss = F.cross_entropy(logits, y)
            soft_loss = F.kl_div(F.log_softmax(logits.float() / t, dim=1), soft, reduction="batchmean") * t * t
        scaler.scale((1 - args.alpha) * hard_loss).backward(retain_graph=True)
        (args.alpha * soft_loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step} hard {hard_loss.item():.4f} soft {soft_loss.item():.4f}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--alpha", type=float, default=0.9)
    p.add_argument("--temperature", type=float, default=2.0)
    p.add_argument("--label-noise", type=float, default=0.8)
    args = p.parse_args()
    torch.manual_seed(12)
    gen = torch.Generator().manual_seed(120)
    rule = torch.randn(16, 8, generator=gen)

    def data(n, noise):
        x = torch.randn(n, 16, generator=gen)
        y = (x @ rule).argmax(1)
        flip = torch.rand(n, generator=gen) < noise
        return x, torch.where(flip, torch.randint(8, (n,), generator=gen), y)

    teacher = pretrain(mlp(96), data)
    distill(mlp(48), teacher, data, args)


main()
