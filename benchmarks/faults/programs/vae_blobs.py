# Variational autoencoder for 8x8 blob images.
import torch
from torch import nn
import torch.nn.functional as F

torch.set_num_threads(1)
SEED, N_ITER, BS, LATENT = 5, 60, 24, 4


class Encoder(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.body = nn.Linear(64, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.mu = nn.Linear(hidden, LATENT)
        self.logvar = nn.Linear(hidden, LATENT)

    def forward(self, x):
        h = F.relu(self.body(x))
        h = F.relu(self.mid(h))
        return self.mu(h), self.logvar(h)


class Decoder(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.up = nn.Linear(LATENT, hidden)
        self.out = nn.Linear(hidden, 64)

    def forward(self, z):
        h = F.relu(self.up(z))
        return self.out(h)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, x, noise):
        mu, logvar = self.encoder(x)
        z = mu + torch.exp(0.5 * logvar) * noise
        return self.decoder(z), mu, logvar


def blobs(n, gen):
    centre = torch.rand(n, 2, generator=gen) * 6 + 1
    axis = torch.arange(8, dtype=torch.float32)
    dx = axis[None, None, :] - centre[:, 0, None, None]
    dy = axis[None, :, None] - centre[:, 1, None, None]
    return torch.exp(-(dx**2 + dy**2) / 3).reshape(n, 64)


def elbo(recon, x, mu, logvar):
    bce = F.binary_cross_entropy_with_logits(recon, x)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(-1).mean()
    return bce + 0.002 * kl


def train():
    gen = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    vae = VAE()
    optim = torch.optim.Adam(vae.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2**13)
    for i in range(N_ITER):
        x = blobs(BS, gen)
        noise = torch.randn(BS, LATENT, generator=gen)
        with torch.autocast("cpu", dtype=torch.float16):
            recon, mu, logvar = vae(x, noise)
            loss = elbo(recon, x, mu, logvar)
        optim.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        if i % 20 == 0:
            print(f"[{i:03d}] loss {loss.item():.4f}")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        x = blobs(96, gen)
        recon, mu, logvar = vae(x, torch.randn(96, LATENT, generator=gen))
        print(f"test loss {elbo(recon, x, mu, logvar).item():.4f}")


train()
