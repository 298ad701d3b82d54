"""GAN on a ring of points; each network has its own optimizer and loss scaler."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2))


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def real_points(n, device):
    angle = 2 * math.pi * torch.rand(n)
    ring = torch.stack([angle.cos(), angle.sin()], dim=1)
    return (ring + 2.0 + 0.02 * torch.randn(n, 2)).to(device)


class GANTrainer:
    def __init__(self):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.g = Generator().to(self.device)
        self.d = Discriminator().to(self.device)
        self.g_opt = torch.optim.Adam(self.g.parameters(), lr=2e-3, betas=(0.0, 0.99))
        self.d_opt = torch.optim.Adam(self.d.parameters(), lr=2e-3, betas=(0.0, 0.99))
        self.g_scaler = torch.amp.GradScaler(self.device)
        self.d_scaler = torch.amp.GradScaler(self.device)

    def autocast(self):
        return torch.autocast(self.device, dtype=torch.float16)

    def d_step(self, real, fake):
        self.d_opt.zero_grad()
        with self.autocast():
            loss = F.softplus(self.d(fake.detach())).mean() + F.softplus(-self.d(real)).mean()
        self.d_scaler.scale(loss).backward()
        self.d_scaler.step(self.d_opt)
        self.d_scaler.update()
        return loss.item()

    def g_step(self, fake):
        self.g_opt.zero_grad()
        with self.autocast():
            loss = F.softplus(-self.d(fake)).mean()
        self.g_scaler.scale(loss).backward()
        self.g_scaler.step(self.g_opt)
        self.g_scaler.update()
        return loss.item()

    def run(self, steps=60):
        for step in range(steps):
            real = real_points(64, self.device)
            with self.autocast():
                fake = self.g(torch.randn(64, 6, device=self.device))
            d_loss = self.d_step(real, fake)
            g_loss = self.g_step(fake)
            if step % 10 == 0:
                gap = (fake.float().mean(0) - real.mean(0)).norm().item()
                print(f"step {step}: d {d_loss:.3f} g {g_loss:.3f} distance of means {gap:.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    GANTrainer().run()
