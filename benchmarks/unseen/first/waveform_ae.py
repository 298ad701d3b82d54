"""Autoencoder for quiet hydrophone recordings (float samples, full scale = 1)."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    frame: int = 1024
    code: int = 32
    batch: int = 64
    steps: int = 70
    lr: float = 2e-3
    level: float = 2e-4


class FrameAE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.enc = nn.Linear(c.frame, c.code, bias=False)
        self.dec = nn.Linear(c.code, c.frame, bias=False)

    def forward(self, x):
        return self.dec(self.enc(x))


def recordings(c, gen):
    t = torch.arange(c.frame) / 8000.0
    bank = torch.stack([torch.sin(2 * torch.pi * (120 + 45 * k) * t + k) for k in range(16)])
    while True:
        yield c.level * torch.randn(c.batch, 16, generator=gen) @ bank / 3


def main():
    c = Config()
    torch.manual_seed(19)
    gen = torch.Generator().manual_seed(190)
    net = FrameAE(c)
    opt = torch.optim.Adam(net.parameters(), lr=c.lr, eps=1e-15)
    reference = None
    for step, x in zip(range(c.steps), recordings(c, gen)):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        snr = 10 * torch.log10(x.square().mean() / loss.detach())
        if step % 10 == 0 or step == c.steps - 1:
            print(f"step {step:3d} loss {loss.item():.3e} snr {snr.item():6.2f} dB")


main()
