"""Diffusion: noise prediction over random timesteps, with a min-SNR weight on the loss."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

T = 1000
betas = torch.linspace(1e-4, 0.02, T, device=device)
alphas = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self, d=16, h=128):
        super().__init__()
        self.freqs = nn.Parameter(torch.exp(torch.linspace(0, 6, 16)), requires_grad=False)
        self.body = nn.Sequential(
            nn.Linear(d + 32, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, d)
        )

    def forward(self, x, t):
        angle = (t.float() / T)[:, None] * self.freqs
        return self.body(torch.cat([x, angle.sin(), angle.cos()], 1))


model = Denoiser().to(device)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
scaler = torch.amp.GradScaler(device)
basis = torch.randn(2, 16, device=device)

for step in range(60):
    x0 = torch.randn(128, 2, device=device) @ basis
    t = torch.randint(0, T, (128,), device=device)
    noise = torch.randn_like(x0)
    a = alphas[t][:, None]
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    with torch.autocast(device, dtype=torch.float16):
        out = model(xt, t)
    snr = (a / (1 - a)).squeeze(1)
    weight = snr.clamp(max=5.0) / snr  # goes down to 1e-4 at small t
    loss = (weight * (out.float() - noise).square().mean(1)).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
