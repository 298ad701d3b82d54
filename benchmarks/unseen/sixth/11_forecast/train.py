import argparse
import torch
from torch import nn
import torch.nn.functional as F


class TCN(nn.Module):
    def __init__(self, ch=32, horizon=8):
        super().__init__()
        self.inp = nn.Conv1d(1, ch, 3, padding=1)
        self.body = nn.ModuleList([nn.Conv1d(ch, ch, 3, padding=2 ** i, dilation=2 ** i) for i in range(3)])
        self.out = nn.Linear(ch, horizon)

    def forward(self, x):
        h = F.relu(self.inp(x[:, None]))
        for c in self.body:
            h = h + F.relu(c(h))
        return self.out(h[..., -1])


class Meter:
    def __init__(self):
        self.v, self.n = 0., 0

    def add(self, v):
        self.v += v
        self.n += 1

    def pop(self):
        r = self.v / max(1, self.n)
        self.v, self.n = 0., 0
        return r


def make(n, T=64, H=8):
    t = torch.arange(T + H).float()
    f = 0.05 + 0.3 * torch.rand(n, 1)
    ph = 6.28 * torch.rand(n, 1)
    s = 9 * torch.sin(f * t + ph) + 0.08 * t * torch.randn(n, 1) + 0.1 * torch.randn(n, T + H)
    return s[:, :T], s[:, T:]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", default=2e-3, type=float)
    p.add_argument("--iters", default=200, type=int)
    p.add_argument("--min-scale", default=32768.0, type=float)
    a = p.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = TCN().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=a.lr)
    scaler = torch.amp.GradScaler(device, init_scale=2. ** 16)
    m = Meter()
    for i in range(a.iters):
        x, y = make(32)
        x, y = x.to(device), y.to(device)
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            pred = net(x)
            loss = F.mse_loss(pred, y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        # keep the scale in the useful range
        if scaler.get_scale() < a.min_scale:
            scaler.update(a.min_scale)
        m.add(loss.item())
        if (i + 1) % 50 == 0:
            print("iter", i + 1, "mse", round(m.pop(), 4))


if __name__ == "__main__":
    main()
