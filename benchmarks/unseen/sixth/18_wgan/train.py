import math
import torch
from torch import nn
from torch.amp import autocast, GradScaler

torch.manual_seed(0)
dev = torch.device("cuda")
ZD, LAMBDA, N_CRITIC = 8, 10.0, 3


def real_batch(n):
    k = torch.randint(0, 8, (n,))
    c = torch.stack([torch.cos(k * math.pi / 4), torch.sin(k * math.pi / 4)], 1)
    return (1.5 * c + 0.05 * torch.randn(n, 2)).cuda()


G = nn.Sequential(nn.Linear(ZD, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).cuda()
D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).cuda()
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.9))
sc_g, sc_d = GradScaler("cuda"), GradScaler("cuda")


def penalty(real, fake):
    eps = torch.rand(len(real), 1, device=dev)
    mix = (eps * real + (1 - eps) * fake).detach().requires_grad_(True)
    with autocast("cuda"):
        out = D(mix)
    grads = torch.autograd.grad(sc_d.scale(out.float().sum()), mix, create_graph=True)[0]
    norm = (grads.float().pow(2).sum(1) + 1e-12).sqrt()
    return LAMBDA * ((norm - 1) ** 2).mean()


def coverage():
    with torch.no_grad():
        x = G(torch.randn(1024, ZD, device=dev)).float()
        r = x.norm(dim=1)
        ang = ((torch.atan2(x[:, 1], x[:, 0]) / (math.pi / 4)).round() % 8).long()
        hit = (r - 1.5).abs() < 0.3
        return hit.float().mean().item(), ang[hit].unique().numel()


for it in range(300):
    for _ in range(N_CRITIC):
        real = real_batch(128)
        with autocast("cuda"):
            fake = G(torch.randn(128, ZD, device=dev))
            wd = D(fake.detach()).mean() - D(real).mean()
        gp = penalty(real, fake.float())
        opt_d.zero_grad()
        sc_d.scale(wd.float() + gp).backward()
        sc_d.step(opt_d)
        sc_d.update()
    opt_g.zero_grad()
    with autocast("cuda"):
        out = G(torch.randn(128, ZD, device=dev))
        lg = -D(out).mean() + 0.05 * out.float().pow(2).sum(1).mean()
    sc_g.scale(lg).backward()
    sc_g.step(opt_g)
    sc_g.update()
    if it % 50 == 49:
        q, modes = coverage()
        print(it, "wd %.3f gp %.3g on ring %.2f modes %d" % (-wd.item(), gp.item(), q, modes))
