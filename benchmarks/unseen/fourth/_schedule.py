import math

import torch


class Cosine:
    """Cosine noise schedule; the last level carries no signal, the first one no noise."""

    def __init__(self, levels=50):
        t = torch.linspace(0, 1, levels, dtype=torch.float64)
        self.signal = torch.cos(t * math.pi / 2).clamp(min=0).float()
        self.noise = torch.sin(t * math.pi / 2).float()
        self.levels = levels
        snr = (self.signal / self.noise) ** 2
        self.weight = snr.clamp(max=5.0) / (snr + 1).clamp(max=1e6) + 0.05

    def corrupt(self, x, level):
        eps = torch.randn_like(x)
        s, n = self.signal[level][:, None], self.noise[level][:, None]
        return s * x + n * eps, s * eps - n * x

    def embed(self, level, dim):
        f = torch.exp(torch.linspace(0, -6, dim // 2))
        a = level[:, None].float() * f
        return torch.cat([a.sin(), a.cos()], -1)
