"""One-day-ahead return forecast from lagged factors; evaluates against predicting zero."""
import argparse
import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader, random_split


def market(n, seed):
    g = torch.Generator().manual_seed(seed)
    f = torch.randn(n, 12, generator=g)
    w = torch.randn(12, generator=g) * 0.04
    r = f @ w + torch.randn(n, generator=g)
    return TensorDataset(f, r)


class Forecaster(nn.Module):
    def __init__(self, i=12, w=24, p=0.3):
        super().__init__()
        self.norm = nn.LayerNorm(i)
        self.net = nn.Sequential(nn.Linear(i, w), nn.ReLU(), nn.Dropout(p), nn.Linear(w, 1))

    def forward(self, x):
        return self.net(self.norm(x)).squeeze(-1)


def evaluate(net, loader):
    net.eval()
    se = se0 = n = 0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for x, y in loader:
            se += (net(x).float() - y).square().sum().item()
            se0 += y.square().sum().item()
            n += len(y)
    net.train()
    return se / n, 1 - se / se0


def main(a):
    torch.manual_seed(a.seed)
    tr, va = random_split(market(12000, a.seed), [10000, 2000])
    tl, vl = DataLoader(tr, a.batch, shuffle=True), DataLoader(va, 500)
    net = Forecaster()
    opt = torch.optim.AdamW(net.parameters(), lr=a.lr, weight_decay=0.1)
    step = 0
    for ep in range(a.epochs):
        acc = 0.0
        for x, y in tl:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            acc += loss.item()
            step += 1
        v, r2 = evaluate(net, vl)
        print(f"epoch {ep} step {step} train {acc / len(tl):.4f} val {v:.4f} r2 {r2:+.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=90)
    main(ap.parse_args([]))
