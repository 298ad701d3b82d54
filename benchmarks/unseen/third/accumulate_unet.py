"""Denoising-diffusion training with micro-batches, clipping and fp32 weight averaging."""
import copy
import math
import torch
from torch import nn
import torch.nn.functional as F

MICRO, WINDOW, T = 8, 4, 100


class Eps(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.temb = nn.Embedding(T, c)
        self.a = nn.Conv2d(1, c, 3, padding=1)
        self.down = nn.Conv2d(c, 2 * c, 4, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * c, c, 4, stride=2, padding=1)
        self.out = nn.Conv2d(2 * c, 1, 3, padding=1)
        nn.init.zeros_(self.out.weight)

    def forward(self, x, t):
        h = F.silu(self.a(x) + self.temb(t)[:, :, None, None])
        u = F.silu(self.up(F.silu(self.down(h))))
        return self.out(torch.cat([h, u], 1))


beta = torch.linspace(1e-3, 0.06, T)
abar = torch.cumprod(1 - beta, 0)


def blobs(n):
    g = torch.linspace(-1, 1, 12)
    c = torch.rand(n, 2, 1, 1) - 0.5
    return torch.exp(-((g[None, :, None] - c[:, 0]) ** 2 + (g[None, None] - c[:, 1]) ** 2) / 0.1).unsqueeze(1) * 2 - 1


@torch.no_grad()
def average(shadow, net, k, decay=0.98):
    d = min(decay, (k + 1) / (k + 10))
    for s, p in zip(shadow.parameters(), net.parameters()):
        s.lerp_(p, 1 - d)


def micro_loss(net):
    x = blobs(MICRO)
    t = torch.randint(0, T, (MICRO,))
    n = torch.randn_like(x)
    a = abar[t][:, None, None, None]
    with torch.autocast("cpu", dtype=torch.float16):
        return F.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * n, t), n)


def main(updates=110):
    torch.manual_seed(62)
    net = Eps()
    shadow = copy.deepcopy(net).requires_grad_(False)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 0.5 * (1 + math.cos(math.pi * k / updates)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 18)
    for k in range(updates):
        total = 0.0
        opt.zero_grad()
        for _ in range(WINDOW):
            loss = micro_loss(net) / WINDOW
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        sched.step()
        average(shadow, net, k)
        if k % 10 == 9:
            with torch.no_grad():
                e = sum(micro_loss(shadow).item() for _ in range(4)) / 4
            print(f"update {k + 1} loss {total:.4f} averaged {e:.4f}")


main()
