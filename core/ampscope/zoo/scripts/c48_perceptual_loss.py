"""Train a tiny super-resolution net with pixel and perceptual losses."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SuperResolver(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.expand = nn.Linear(16, 64)
        self.refine = nn.Linear(64, 64)

    def forward(self, low):
        coarse = self.expand(low)
        return coarse + self.refine(F.leaky_relu(coarse, 0.1))


class FeatureLoss(nn.Module):
    """L1 distance between features of a frozen random network."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48))
        self.features.requires_grad_(False)

    def forward(self, fake, real):
        return F.l1_loss(self.features(fake), self.features(real))


class Solver:
    def __init__(self):
        torch.manual_seed(0)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.net = SuperResolver().to(self.device)
        self.perceptual = FeatureLoss().to(self.device)
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=4e-3)
        self.gradscaler = torch.amp.GradScaler(self.device, init_scale=2.0**40)
        self.upsample = torch.randn(16, 64) / 4

    def feed_data(self):
        low = torch.randn(32, 16)
        high = torch.tanh(low @ self.upsample)
        return low.to(self.device), high.to(self.device)

    def optimize_parameters(self):
        low, high = self.feed_data()
        self.optim.zero_grad()
        with torch.autocast(self.device, dtype=torch.float16):
            fake = self.net(low)
            loss = F.l1_loss(fake, high) + 8.0 * self.perceptual(fake, high)
        self.gradscaler.scale(loss).backward()
        self.gradscaler.step(self.optim)
        self.gradscaler.update()
        return loss.item()

    def train(self, iters=60):
        for it in range(1, iters + 1):
            value = self.optimize_parameters()
            if it % 10 == 0:
                print(f"iter {it}: l_total {value:.4f}")


if __name__ == "__main__":
    Solver().train()
