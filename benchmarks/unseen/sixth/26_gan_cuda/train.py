import math
import torch
from torch import nn
import torch.nn.functional as F
from torch.amp import autocast, GradScaler

torch.manual_seed(0)
dev = "cuda"
Z = 8


def mk(i, o, act):
    return nn.Sequential(nn.Linear(i, 64), act, nn.Linear(64, 64), act, nn.Linear(64, o))


G, D = mk(Z, 2, nn.ReLU()).cuda(), mk(2, 1, nn.LeakyReLU(0.2)).cuda()
og = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.99))
od = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.99))
sg, sd = GradScaler("cuda", init_scale=2.0 ** 20), GradScaler("cuda", init_scale=2.0 ** 20)


def real(n):
    k = torch.randint(0, 6, (n,)).float() * math.pi / 3
    return (torch.stack([k.cos(), k.sin()], 1) + 0.05 * torch.randn(n, 2)).cuda()


def r1(x):
    x = x.detach().requires_grad_(True)
    with autocast(dev):
        o = D(x)
    g = torch.autograd.grad(sd.scale(o.float().sum()), x, create_graph=True)[0]
    g = g.float() * (1.0 / sd.get_scale())
    if not torch.isfinite(g).all():
        return None
    return g.pow(2).sum(1).mean()


drops = 0
for it in range(500):
    x = real(128)
    with autocast(dev):
        f = G(torch.randn(128, Z, device=dev))
        dr, df = D(x), D(f.detach())
        ld = F.binary_cross_entropy_with_logits(dr, torch.full_like(dr, 0.9)) + F.binary_cross_entropy_with_logits(df, torch.zeros_like(df))
    if it % 4 == 0:
        p = r1(x)
        if p is not None:
            ld = ld + 0.4 * p
    od.zero_grad()
    a = sd.get_scale()
    sd.scale(ld).backward()
    sd.step(od)
    sd.update()
    drops += sd.get_scale() < a
    with autocast(dev):
        o = D(G(torch.randn(128, Z, device=dev)))
        lg = F.binary_cross_entropy_with_logits(o, torch.ones_like(o))
    og.zero_grad()
    a = sg.get_scale()
    sg.scale(lg).backward()
    sg.step(og)
    sg.update()
    drops += sg.get_scale() < a
    if it % 100 == 99:
        with torch.no_grad():
            s = G(torch.randn(1024, Z, device=dev)).float()
        ok = (s.norm(dim=1) - 1).abs() < 0.25
        print(it, "D %.3f G %.3f" % (ld.item(), lg.item()), "on ring %.2f" % ok.float().mean().item(), "overflows", drops)
