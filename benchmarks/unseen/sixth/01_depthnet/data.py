import torch
from torch.utils.data import Dataset


class DepthCounts(Dataset):
    """16 bit depth frames from the sensor (0 .. 65535, 1/8 mm per count) and the plane angles"""

    def __init__(self, n, size, seed=0):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
        self.angles = torch.rand(n, 2, generator=g) * 2 - 1
        base = 38000 + 4000 * torch.rand(n, 1, 1, generator=g)
        d = base + 11000 * (self.angles[:, 0, None, None] * xx + self.angles[:, 1, None, None] * yy)
        d = d + 250 * torch.randn(n, size, size, generator=g)
        self.frames = d.clamp(0, 65535).round().to(torch.int32)

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        return self.frames[i].float()[None], self.angles[i]
