"""GAN with an R1 penalty every fourth step, its gradients taken unscaled, in fp32."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

G = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2)).to(device)
D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.99))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.99))
scaler = torch.amp.GradScaler(device)

for step in range(40):
    real = torch.randn(64, 2, device=device) * 0.2 + 1.0
    with torch.autocast(device, dtype=torch.float16):
        fake = G(torch.randn(64, 8, device=device))
        d_loss = F.softplus(D(fake.detach())).mean() + F.softplus(-D(real)).mean()
    opt_d.zero_grad()
    scaler.scale(d_loss).backward()
    if step % 4 == 0:
        real.requires_grad_(True)
        (grad,) = torch.autograd.grad(D(real).sum(), real, create_graph=True)
        scaler.scale(0.5 * grad.square().sum(1).mean() * 4).backward()
    scaler.step(opt_d)
    with torch.autocast(device, dtype=torch.float16):
        g_loss = F.softplus(-D(fake)).mean()
    opt_g.zero_grad()
    scaler.scale(g_loss).backward()
    scaler.step(opt_g)
    scaler.update()
    if step % 10 == 0:
        print(step, d_loss.item(), g_loss.item())
