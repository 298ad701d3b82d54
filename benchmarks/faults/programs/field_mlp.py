"""Fit an image as a neural field with Fourier features (NeRF's MLP in two dimensions)."""
import math

import torch
import torch.nn as nn


class FourierFeatures(nn.Module):
    def __init__(self, bands=4):
        super().__init__()
        bands_hz = 2.0 ** torch.arange(bands, dtype=torch.float32) * math.pi
        self.register_buffer("freq", bands_hz)

    def forward(self, xy):
        angle = xy[..., None] * self.freq
        return torch.cat([angle.sin(), angle.cos()], -1).flatten(-2)


class Field(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.encode = FourierFeatures()
        self.lin0 = nn.Linear(16, width)
        self.lin1 = nn.Linear(width, width)
        self.lin2 = nn.Linear(width + 16, width)
        self.rgb = nn.Linear(width, 3)

    def forward(self, xy):
        e = self.encode(xy)
        h = torch.relu(self.lin0(e))
        h = torch.relu(self.lin1(h))
        h = torch.relu(self.lin2(torch.cat([h, e], -1)))
        return torch.sigmoid(self.rgb(h))


def colour(xy):
    x, y = xy.unbind(-1)
    return torch.stack([0.5 + 0.5 * torch.sin(5 * x), 0.5 + 0.5 * torch.cos(4 * y), ((x * y) > 0).float()], -1)


class FieldTrainer:
    def __init__(self, lr=5e-3, iters=64, rays=64):
        torch.manual_seed(51)
        self.gen = torch.Generator().manual_seed(51)
        self.iters, self.rays = iters, rays
        self.field = Field()
        self.adam = torch.optim.Adam(self.field.parameters(), lr=lr)
        self.lr_schedule = torch.optim.lr_scheduler.ExponentialLR(self.adam, 0.99)
        self.amp_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def rays_of(self, n):
        return torch.rand(n, 2, generator=self.gen) * 2 - 1

    def photometric(self, xy):
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = self.field(xy)
        return (predicted.float() - colour(xy)).pow(2).mean()

    def train(self):
        for it in range(self.iters):
            xy = self.rays_of(self.rays)
            loss = self.photometric(xy)
            self.adam.zero_grad(set_to_none=True)
            self.amp_scaler.scale(loss).backward()
            self.amp_scaler.step(self.adam)
            self.amp_scaler.update()
            self.lr_schedule.step()
            if it % 16 == 0:
                print(f"[{it:>4}] loss={loss.item():.5f} psnr={-10 * math.log10(loss.item() + 1e-12):.2f}")

    @torch.no_grad()
    def test(self):
        loss = self.photometric(self.rays_of(512))
        print(f"[test] loss={loss.item():.5f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = FieldTrainer()
    trainer.train()
    trainer.test()
