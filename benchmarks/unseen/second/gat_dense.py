import torch
from torch import nn
import torch.nn.functional as F


class GraphAttention(nn.Module):
    def __init__(self, fin, fout):
        super().__init__()
        self.proj = nn.Linear(fin, fout, bias=False)
        self.src = nn.Linear(fout, 1, bias=False)
        self.dst = nn.Linear(fout, 1, bias=False)

    def forward(self, x, adj):
        h = self.proj(x)
        e = F.leaky_relu(self.src(h) + self.dst(h).transpose(-1, -2), 0.2)
        e = e.masked_fill(~adj, float("-inf"))
        return torch.softmax(e, -1) @ h


class Molecules(nn.Module):
    def __init__(self, fin=8, hidden=48):
        super().__init__()
        self.g1 = GraphAttention(fin, hidden)
        self.g2 = GraphAttention(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x, adj, n_atoms):
        h = F.elu(self.g1(x, adj))
        h = F.elu(self.g2(h, adj))
        keep = (torch.arange(x.shape[1]) < n_atoms.unsqueeze(1)).unsqueeze(-1)
        pooled = (h * keep).sum(1) / n_atoms.unsqueeze(1)
        return self.out(pooled).squeeze(-1)


def chain_graphs(n, size, g, ring_only):
    x = torch.randn(n, size, 8, generator=g)
    adj = torch.zeros(n, size, size, dtype=torch.bool)
    i = torch.arange(size)
    adj[:, i, (i + 1) % size] = True
    adj[:, (i + 1) % size, i] = True
    extra = torch.rand(n, size, size, generator=g) < 0.1
    adj |= extra | extra.transpose(1, 2)
    n_atoms = torch.full((n,), size)
    if not ring_only:
        cut = torch.randint(n, (2,), generator=g)
        adj[cut, 0, :] = False
        adj[cut, :, 0] = False
    y = x[..., 0].mean(1) * 2 + x[..., 1].abs().mean(1)
    return x, adj, n_atoms, y


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(11)
    model = Molecules()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(120):
        x, adj, n_atoms, y = chain_graphs(32, 14, g, ring_only=step < 45)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = model(x, adj, n_atoms)
            loss = F.mse_loss(pred.float(), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if (step + 1) % 15 == 0:
            print(f"{step + 1:4d}  mse {loss.item():.4f}")


main()
