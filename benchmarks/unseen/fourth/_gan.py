import math

import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self, z=8, width=48, out=2):
        super().__init__()
        self.z = z
        self.net = nn.Sequential(nn.Linear(z, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                 nn.Linear(width, out))

    def forward(self, n):
        return self.net(torch.randn(n, self.z))


class Critic(nn.Module):
    def __init__(self, dim=2, width=48):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        return self.score(self.features(x)).squeeze(-1)


class Ring:
    def __init__(self, modes=6, radius=2.0, spread=0.1, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.modes, self.radius, self.spread = modes, radius, spread

    def sample(self, n):
        k = torch.randint(self.modes, (n,), generator=self.g).float() * (2 * math.pi / self.modes)
        c = self.radius * torch.stack([torch.cos(k), torch.sin(k)], -1) + torch.tensor([1.5, -1.0])
        return c + self.spread * torch.randn(n, 2, generator=self.g)


def energy_distance(a, b):
    ab, aa, bb = torch.cdist(a, b).mean(), torch.cdist(a, a).mean(), torch.cdist(b, b).mean()
    return (2 * ab - aa - bb).item()
