import math
import torch
from torch import nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
SR, N = 2000, 1600
AMP = torch.bfloat16


class FourierTime(nn.Module):
    def __init__(self, n, bands, dtype):
        super().__init__()
        self.register_buffer("t", torch.arange(n, device=device).to(dtype) / SR)
        self.register_buffer("freq", torch.linspace(1, 60, bands))

    def forward(self, idx):
        ph = 2 * math.pi * self.t[idx][:, None] * self.freq
        return torch.cat([ph.sin(), ph.cos()], -1)


class Field(nn.Module):
    def __init__(self, bands=48, w=96):
        super().__init__()
        self.embed = nn.ModuleDict({"time": FourierTime(N, bands, AMP)})
        self.mlp = nn.Sequential(nn.Linear(2 * bands, w), nn.SiLU(), nn.Linear(w, w), nn.SiLU(), nn.Linear(w, 1))

    def forward(self, idx):
        return self.mlp(self.embed["time"](idx)).squeeze(-1)


tt = torch.arange(N).float() / SR
sig = sum(a * torch.sin(2 * math.pi * f * tt + p) for a, f, p in [(1, 3, .2), (.8, 17.5, 1.), (.7, 31, 2.), (.7, 52, .5)])
net = Field().to(device)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 700)
run = None
for it in range(700):
    idx = torch.randint(0, N, (256,))
    y = sig[idx].to(device)
    with torch.autocast(device, dtype=AMP):
        out = net(idx.to(device))
    loss = F.mse_loss(out.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    sch.step()
    run = loss.item() if run is None else 0.95 * run + 0.05 * loss.item()
    if it % 100 == 99:
        print(it, "mse %.5f" % run, "psnr %.1f" % (10 * math.log10(16 / max(run, 1e-9))))
