"""Wasserstein critic with a gradient penalty, trained on samples of two point clouds."""

import torch
import torch.nn as nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


def gradient_penalty(critic, real, fake, scaler):
    mix = torch.rand(len(real), 1, device=real.device)
    x = (mix * real + (1 - mix) * fake).requires_grad_()
    with torch.autocast(x.device.type, dtype=torch.float16):
        score = critic(x).float()
    (grad,) = torch.autograd.grad(scaler.scale(score.sum()), x, create_graph=True)
    grad = grad / scaler.get_scale()
    return ((grad.norm(dim=1) - 1) ** 2).mean()


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    critic = Critic().to(device)
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.9))
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    for step in range(60):
        real = (torch.randn(64, 4) + 1.0).to(device)
        fake = (torch.randn(64, 4) - 1.0).to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            wasserstein = critic(fake).mean() - critic(real).mean()
        penalty = gradient_penalty(critic, real, fake, scaler)
        loss = wasserstein + 10 * penalty
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step}: critic {wasserstein.item():.3f} penalty {penalty.item():.3f}")


if __name__ == "__main__":
    main()
