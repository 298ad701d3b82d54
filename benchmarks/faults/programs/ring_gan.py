"""Non-saturating GAN on a ring, R1 penalty on real samples, one scaler per network."""
import argparse

import torch
from torch import nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, z=4, width=32):
        super().__init__()
        self.inp = nn.Linear(z, width)
        self.hid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, z):
        h = F.leaky_relu(self.inp(z), 0.2)
        h = F.leaky_relu(self.hid(h), 0.2)
        return self.out(h)


class Discriminator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.hid = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, xy):
        h = F.leaky_relu(self.inp(xy), 0.2)
        h = F.leaky_relu(self.hid(h), 0.2)
        return self.score(h)


def ring(n, gen):
    t = 2 * torch.pi * torch.rand(n, generator=gen)
    r = 2 + 0.05 * torch.randn(n, generator=gen)
    return torch.stack([r * t.cos(), r * t.sin()], dim=1)


def energy_distance(a, b):
    ab, aa, bb = torch.cdist(a, b).mean(), torch.cdist(a, a).mean(), torch.cdist(b, b).mean()
    return (2 * ab - aa - bb).item()


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=70)
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--r1", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=2)
    return p.parse_args()


def main():
    opt = parse()
    torch.set_num_threads(1)
    torch.manual_seed(opt.seed)
    gen = torch.Generator().manual_seed(opt.seed)
    netG = Generator()
    netD = Discriminator()
    optG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.99))
    optD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.99))
    scalerG = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scalerD = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    probe = torch.randn(256, 4, generator=gen)
    held_out = ring(256, gen)
    print("start: loss", round(energy_distance(netG(probe).detach(), held_out), 4))

    for it in range(opt.iters):
        real = ring(opt.batch, gen).requires_grad_(True)
        z = torch.randn(opt.batch, 4, generator=gen)
        with torch.autocast("cpu", dtype=torch.float16):
            fake = netG(z)
            d_real = netD(real)
            d_fake = netD(fake.detach())
            lossD = (F.softplus(-d_real.float()) + F.softplus(d_fake.float())).mean()
        grads = torch.autograd.grad(scalerD.scale(d_real.float().sum()), real, create_graph=True)
        grads = [g / scalerD.get_scale() for g in grads]
        penalty = grads[0].float().pow(2).sum(1).mean()
        lossD = lossD + opt.r1 * penalty
        optD.zero_grad()
        scalerD.scale(lossD).backward()
        scalerD.step(optD)
        scalerD.update()

        with torch.autocast("cpu", dtype=torch.float16):
            lossG = F.softplus(-netD(netG(z)).float()).mean()
        optG.zero_grad()
        scalerG.scale(lossG).backward()
        scalerG.step(optG)
        scalerG.update()
        if it % 35 == 0:
            print(f"{it}: D {lossD.item():.3f} G {lossG.item():.3f} r1 {penalty.item():.3f}")

    with torch.no_grad():
        samples = netG(probe)
    print("final: loss", round(energy_distance(samples, held_out), 4))


if __name__ == "__main__":
    main()
