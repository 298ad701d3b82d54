import torch
from torch import nn


def scatter_sum(src, index, n):
    out = torch.zeros(n, dtype=src.dtype, device=src.device)
    return out.index_add_(0, index, src)


class AtomNet(nn.Module):
    def __init__(self, hidden=48, n_types=4):
        super().__init__()
        self.type_emb = nn.Embedding(n_types, hidden)
        self.env = nn.Linear(3, hidden)
        self.net = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, g):
        h = self.type_emb(g["z"]) + self.env(g["env"])
        e = self.net(h).squeeze(-1)
        return scatter_sum(e, g["graph"], g["n"])
