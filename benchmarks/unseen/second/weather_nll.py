import math
import torch
import torch.nn as nn


def positive(x):
    return torch.where(x > 10.0, x, torch.log1p(torch.exp(x)))


class GaussianHead(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mean = nn.Linear(dim, 1)
        self.spread = nn.Linear(dim, 1)

    def forward(self, h):
        return self.mean(h).squeeze(-1), positive(self.spread(h)).squeeze(-1)


class Forecaster(nn.Module):
    def __init__(self, fin=12, dim=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(fin, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU())
        self.head = GaussianHead(dim)

    def forward(self, x):
        return self.head(self.trunk(x))


def nll(mu, sigma, y):
    mu, sigma = mu.float(), sigma.float() + 1e-3
    return (0.5 * ((y - mu) / sigma) ** 2 + sigma.log() + 0.5 * math.log(2 * math.pi)).mean()


def observations(n, g):
    x = torch.randn(n, 12, generator=g)
    mean = 10 + 4 * x[:, 0] + 3 * x[:, 1] * x[:, 2]
    sd = 3 + 11 * torch.sigmoid(2 * x[:, 3])
    return x, mean + sd * torch.randn(n, generator=g)


def main(steps=300):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Forecaster()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    avg = None
    for i in range(steps):
        x, y = observations(256, g)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            mu, sigma = model(x)
        loss = nll(mu, sigma, y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        avg = loss.item() if avg is None else 0.9 * avg + 0.1 * loss.item()
        if (i + 1) % 30 == 0:
            print(f"step {i + 1} nll {avg:.4f} mean spread {sigma.mean().item():.2f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
