import math
import torch
from torch import nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
STEPS_T, LOSS_SCALE = 200, 1024.0


class Eps(nn.Module):
    def __init__(self, w=96):
        super().__init__()
        self.temb = nn.Sequential(nn.Linear(32, w), nn.SiLU())
        self.i = nn.Linear(2, w)
        self.h = nn.ModuleList([nn.Linear(w, w) for _ in range(2)])
        self.o = nn.Linear(w, 2)
        nn.init.zeros_(self.o.weight)
        nn.init.zeros_(self.o.bias)
        self.register_buffer("f", torch.exp(torch.linspace(0, -6, 16)))

    def forward(self, x, t):
        a = t.float()[:, None] * self.f
        e = self.temb(torch.cat([a.sin(), a.cos()], -1))
        h = self.i(x) + e
        for l in self.h:
            h = h + F.silu(l(h))
        return self.o(h)


betas = torch.linspace(1e-4, 0.04, STEPS_T)
abar = torch.cumprod(1 - betas, 0).to(device)


def data(n):
    a = torch.rand(n) * 3 * math.pi + 1
    return torch.stack([a.cos(), a.sin()], 1) * a[:, None] / 5 + 0.03 * torch.randn(n, 2)


net = Eps().to(device)
ema = {k: v.detach().clone() for k, v in net.named_parameters()}
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
dropped, run = 0, None
for it in range(500):
    x0 = data(256).to(device)
    t = torch.randint(0, STEPS_T, (256,), device=device)
    n = torch.randn_like(x0)
    ab = abar[t][:, None]
    with torch.autocast(device, dtype=torch.float16):
        pred = net(ab.sqrt() * x0 + (1 - ab).sqrt() * n, t)
    loss = F.mse_loss(pred.float(), n)
    opt.zero_grad()
    (loss * LOSS_SCALE).backward()
    for p in net.parameters():
        p.grad.div_(LOSS_SCALE)
    gn = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if not torch.isfinite(gn):
        dropped += 1
        continue
    opt.step()
    with torch.no_grad():
        for k, v in net.named_parameters():
            ema[k].mul_(0.99).add_(v, alpha=0.01)
    run = loss.item() if run is None else 0.98 * run + 0.02 * loss.item()
    if it % 100 == 99:
        print(it, "loss %.4f dropped %d" % (run, dropped))
