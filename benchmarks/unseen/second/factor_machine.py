import torch
import torch.nn as nn


class FactorMachine(nn.Module):
    def __init__(self, fields=(200, 150, 20), dim=16):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, dim) for n in fields)
        self.biases = nn.ModuleList(nn.Embedding(n, 1) for n in fields)
        for t in self.tables:
            nn.init.normal_(t.weight, std=0.1)
        for b in self.biases:
            nn.init.zeros_(b.weight)

    def forward(self, ids):
        v = torch.stack([t(ids[:, i]) for i, t in enumerate(self.tables)], 1)
        linear = sum(b(ids[:, i]).squeeze(-1) for i, b in enumerate(self.biases))
        pair = 0.5 * (v.sum(1) ** 2 - (v ** 2).sum(1)).sum(-1)
        return linear + pair


def ratings(n, truth, g):
    ids = torch.stack([torch.randint(t.shape[0], (n,), generator=g) for t in truth], 1)
    y = sum(t[ids[:, i], 0] for i, t in enumerate(truth))
    y = y + truth[0][ids[:, 0], 1] * truth[1][ids[:, 1], 1]
    return ids, y


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(9)
    truth = [torch.randn(n, 2, generator=g) for n in (200, 150, 20)]
    model = FactorMachine().half()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
    total = 0.0
    for step in range(400):
        ids, y = ratings(512, truth, g)
        loss = (model(ids).float() - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
        if step % 50 == 49:
            print(f"step {step + 1} mse {total / 50:.4f}")
            total = 0.0


if __name__ == "__main__":
    main()
