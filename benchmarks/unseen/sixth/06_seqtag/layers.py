import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-8):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.scale


class GLUBlock(nn.Module):
    def __init__(self, dim, hid, eps):
        super().__init__()
        self.up = nn.Linear(dim, 2 * hid, bias=False)
        self.norm = RMSNorm(hid, eps)
        self.down = nn.Linear(hid, dim, bias=False)
        self.mixer = nn.Conv1d(dim, dim, 3, padding=1, groups=dim, bias=False)

    def forward(self, x):
        a, b = self.up(x).chunk(2, -1)
        h = self.down(self.norm(a * torch.sigmoid(b)))
        return x + h + self.mixer(x.transpose(1, 2)).transpose(1, 2)
