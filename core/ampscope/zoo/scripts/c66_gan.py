"""A small GAN on 2-D points: discriminator step, then generator step."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, n_out))


class StyleGAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.G = mlp(8, 2)
        self.D = mlp(2, 1)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gan = StyleGAN().to(device)
    D_opt = torch.optim.Adam(gan.D.parameters(), lr=2e-3, betas=(0.0, 0.99))
    G_opt = torch.optim.Adam(gan.G.parameters(), lr=2e-3, betas=(0.0, 0.99))
    scaler = torch.amp.GradScaler(device)
    d_weight, g_weight = 2e4, 1e-6

    for step in range(60):
        real = torch.randn(64, 2) * 0.3 + torch.tensor([2.0, -1.0])
        real = real.to(device)
        noise = torch.randn(64, 8, device=device)

        D_opt.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            fake = gan.G(noise).detach()
            fake_score, real_score = gan.D(fake).float(), gan.D(real).float()
            d_loss = F.softplus(fake_score).mean() + F.softplus(-real_score).mean()
        scaler.scale(d_loss * d_weight).backward()
        scaler.step(D_opt)

        G_opt.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            fake = gan.G(noise)
            g_loss = F.softplus(-gan.D(fake).float()).mean()
        scaler.scale(g_loss * g_weight).backward()
        scaler.step(G_opt)
        scaler.update()
        if step % 10 == 0:
            distance = (fake.float().mean(0) - real.mean(0)).norm()
            print(
                f"step {step}: d {d_loss.item():.3f} g {g_loss.item():.3f} "
                f"distance {distance.item():.3f}"
            )


if __name__ == "__main__":
    main()
