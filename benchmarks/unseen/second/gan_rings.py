import math
import torch
import torch.nn as nn
import torch.nn.functional as F


def net(a, b, width=48):
    return nn.Sequential(nn.Linear(a, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, b))


class Gan:
    def __init__(self, r1=0.2):
        self.g, self.d, self.r1 = net(8, 2), net(2, 1), r1
        self.og = torch.optim.Adam(self.g.parameters(), lr=1e-3, betas=(0.5, 0.99))
        self.od = torch.optim.Adam(self.d.parameters(), lr=2e-3, betas=(0.5, 0.99))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 18)

    def d_step(self, real):
        self.od.zero_grad()
        real = real.requires_grad_(True)
        with torch.autocast("cpu", dtype=torch.float16):
            fake = self.g(torch.randn(len(real), 8)).detach()
            dr, df = self.d(real), self.d(fake)
        adv = F.softplus(-dr.float()).mean() + F.softplus(df.float()).mean()
        s = self.scaler.get_scale()
        (grad,) = torch.autograd.grad(self.scaler.scale(dr.float().sum() / 64), real, create_graph=True)
        grad = grad.float() * 64 / s
        loss = adv + 0.5 * self.r1 * grad.square().sum(1).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.od)
        return loss.item()

    def g_step(self, n):
        self.og.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.d(self.g(torch.randn(n, 8)))
        loss = F.softplus(-out.float()).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.og)
        return loss.item()


def ring(n):
    t = 2 * math.pi * torch.rand(n)
    return 1.5 * torch.stack([t.cos(), t.sin()], 1) + 0.05 * torch.randn(n, 2)


def main(steps=300):
    torch.manual_seed(0)
    gan = Gan()
    for s in range(steps):
        d = gan.d_step(ring(128))
        g = gan.g_step(128)
        gan.scaler.update()
        if s % 50 == 49:
            with torch.no_grad():
                r = gan.g(torch.randn(512, 8)).norm(dim=1)
            print(f"step {s + 1} d {d:.3f} g {g:.3f} radius {r.mean():.3f} scale {gan.scaler.get_scale():g}")


if __name__ == "__main__":
    main()
