"""VAE on count images; the ELBO is reported and optimised as a sum over pixels and batch."""
import torch
from torch import nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, d=256, h=96, z=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.Softplus(), nn.Linear(h, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, h), nn.Softplus(), nn.Linear(h, d))

    def forward(self, x):
        mu, lv = self.enc(torch.log1p(x)).float().chunk(2, -1)
        lv = lv.clamp(-8, 4)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.dec(z).float(), mu, lv


class SummedELBO(nn.Module):
    def forward(self, lograte, mu, lv, x):
        rec = F.poisson_nll_loss(lograte.clamp(max=7.0), x, log_input=True, full=False, reduction="sum")
        kl = -0.5 * (1 + lv - mu.square() - lv.exp()).sum()
        return rec + kl, kl


class Photons:
    def __init__(self):
        g = torch.arange(16.0)
        self.yy, self.xx = torch.meshgrid(g, g, indexing="ij")

    def take(self, n):
        c = 4 + 8 * torch.rand(n, 2, 1, 1)
        w = 2 + 4 * torch.rand(n, 1, 1)
        rate = 20 * torch.exp(-((self.yy - c[:, 0]) ** 2 + (self.xx - c[:, 1]) ** 2) / (2 * w * w)) + 0.5
        return torch.poisson(rate).flatten(1)


torch.manual_seed(71)
src, vae, elbo = Photons(), VAE(), SummedELBO()
opt = torch.optim.Adam(vae.parameters(), lr=1.5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
skipped = 0
for it in range(300):
    x = src.take(64)
    with torch.autocast("cpu", dtype=torch.float16):
        out = vae(x)
    loss, kl = elbo(*out, x)
    opt.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    skipped += scaler.get_scale() < before
    if it % 30 == 0 or it == 299:
        print(f"it {it} loss {loss.item():.1f} kl {kl.item():.1f} scale {scaler.get_scale():g} skipped {skipped}")
