"""WGAN-GP: the penalty's gradients are of a scaled output, and divided by the scale before the norm."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
C = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(C.parameters(), lr=1e-3, betas=(0.5, 0.9))
scaler_c, scaler_g = (torch.amp.GradScaler(device) for _ in range(2))

for step in range(40):
    real = torch.randn(64, 2, device=device) * 0.2 + 1.0
    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
        fake = G(torch.randn(64, 8, device=device)).float()
    mix = torch.rand(64, 1, device=device)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    with torch.autocast(device, dtype=torch.float16):
        out = C(between)
    scaled = torch.autograd.grad(scaler_c.scale(out.sum()), between, create_graph=True)[0]
    grad = scaled / scaler_c.get_scale()
    penalty = 10 * (grad.norm(dim=1) - 1).square().mean()
    with torch.autocast(device, dtype=torch.float16):
        loss = C(fake).mean() - C(real).mean()
    loss = loss.float() + penalty
    opt_c.zero_grad()
    scaler_c.scale(loss).backward()
    scaler_c.step(opt_c)
    scaler_c.update()
    if step % 2 == 0:
        with torch.autocast(device, dtype=torch.float16):
            g_loss = -C(G(torch.randn(64, 8, device=device))).mean()
        opt_g.zero_grad()
        scaler_g.scale(g_loss).backward()
        scaler_g.step(opt_g)
        scaler_g.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler_c.get_scale())
