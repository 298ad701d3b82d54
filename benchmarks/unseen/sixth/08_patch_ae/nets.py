import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.ch * c.img * c.img // 16
        self.c = c
        self.enc = nn.Sequential(nn.Conv2d(c.ch, 32, 4, 4), nn.SiLU(), nn.Flatten(), nn.Linear(32 * (c.img // 4) ** 2, 2 * c.latent))
        self.dec = nn.Sequential(nn.Linear(c.latent, 128), nn.SiLU(), nn.Linear(128, 16 * (c.img // 4) ** 2))
        self.up = nn.ConvTranspose2d(16, c.ch, 4, 4)

    def forward(self, x):
        mu, lv = self.enc(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * lv.float()).to(mu.dtype)
        s = self.c.img // 4
        return self.up(self.dec(z).view(-1, 16, s, s)), mu, lv
