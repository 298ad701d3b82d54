"""Contrastive learning on 1-d signals (NT-Xent), momentum copy kept for evaluation."""
import torch
from torch import nn
import torch.nn.functional as F


class Enc(nn.Module):
    def __init__(self, c=24, out=32):
        super().__init__()
        self.f = nn.Sequential(nn.Conv1d(1, c, 7, stride=3), nn.BatchNorm1d(c), nn.ReLU(), nn.Conv1d(c, c, 5, stride=2), nn.ReLU())
        self.p = nn.Linear(c, out)

    def forward(self, x):
        return self.p(self.f(x).mean(-1))


class NTXent(nn.Module):
    def __init__(self, tau=0.1):
        super().__init__()
        self.tau = tau

    def forward(self, a, b):
        z = F.normalize(torch.cat([a, b]).float(), dim=-1)
        with torch.autocast("cpu", enabled=False):
            s = z @ z.t() / self.tau
        s.fill_diagonal_(float("-inf"))
        n = len(a)
        target = torch.cat([torch.arange(n) + n, torch.arange(n)])
        hardest = s.detach().amax(1).mean()
        return F.cross_entropy(s, target), hardest


def augment(x):
    x = torch.roll(x, int(torch.randint(0, 30, ())), -1) * (0.5 + torch.rand(len(x), 1, 1))
    return x + 0.1 * torch.randn_like(x)


def signals(n):
    f = 1 + torch.randint(0, 40, (n, 1)).float() / 2
    t = torch.linspace(0, 6.283, 96)
    return (torch.sin(f * t) + 0.5 * torch.sin(2 * f * t + 1)).unsqueeze(1)


torch.manual_seed(28)
enc, crit = Enc(), NTXent()
ema = torch.optim.swa_utils.AveragedModel(enc, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99), use_buffers=True)
opt = torch.optim.AdamW(enc.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 15)
best = float("inf")
for it in range(240):
    x = signals(32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss, hard = crit(enc(augment(x)), enc(augment(x)))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    ema.update_parameters(enc)
    if it % 24 == 0 or it == 239:
        ema.eval()
        with torch.no_grad():
            v, _ = crit(ema(augment(x)), ema(augment(x)))
        best = min(best, v.item())
        print(f"{it} loss {loss.item():.4f} hardest {hard.item():.2f} averaged {v.item():.4f} best {best:.4f}")
