"""Predict event counts: a Poisson model whose rate uses a linear-exponential link."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class RateNet(nn.Module):
    """Maps covariates to one score per channel."""

    def __init__(self, n_in=8, n_channels=6):
        super().__init__()
        self.hidden = nn.Linear(n_in, 48)
        self.score = nn.Linear(48, n_channels)
        # counts are about a dozen per bin, so start there
        nn.init.constant_(self.score.bias, 12.0)

    def forward(self, x):
        return self.score(torch.relu(self.hidden(x)))


def rate_from_score(a):
    """exp below zero, linear above: positive, smooth, and it does not blow up."""
    return torch.where(a <= 0, torch.exp(a.clamp(max=0.0)), 1.0 + a)


def poisson_loss(rate, counts):
    rate = rate.float()
    return (rate - counts * torch.log(rate + 1e-6) + torch.lgamma(counts + 1)).mean()


def main():
    torch.manual_seed(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(320, 8)
    rate = 14.0 + 6.0 * torch.tanh(x[:, :6])
    counts = torch.poisson(rate)
    loader = DataLoader(TensorDataset(x, counts), batch_size=32, shuffle=True)

    net = RateNet().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(5):
        running = 0.0
        for xb, cb in loader:
            xb, cb = xb.to(device), cb.to(device)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                score = net(xb)
            loss = poisson_loss(rate_from_score(score), cb)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            running += loss.item()
        print(f"epoch {epoch}: negative log likelihood {running / len(loader):.4f}")


if __name__ == "__main__":
    main()
