import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class LocalContrast(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x):
        mu = x.mean(-1, keepdim=True)
        var = (x - mu).square().mean(-1, keepdim=True)
        x = (x - mu) / torch.sqrt(var + 1e-8)
        return x * self.gain + self.shift


class SegNet(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.inp = nn.Conv1d(1, ch, 9, padding=4, bias=False)
        self.contrast = LocalContrast(ch)
        self.mid = nn.Conv1d(ch, ch, 9, padding=4)
        self.out = nn.Conv1d(ch, 2, 1)

    def forward(self, x):
        h = F.relu(self.contrast(self.inp(x)))
        return self.out(F.relu(self.mid(h)))


class Holter:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def batch(self, n, lead_off=0.0, length=256):
        t = torch.arange(length).float()
        period = 40 + 20 * torch.rand(n, 1, generator=self.g)
        start = period * torch.rand(n, 1, generator=self.g)
        phase = ((t - start) % period) / period
        beat = torch.exp(-((phase - 0.5) / 0.06) ** 2)
        x = beat + 0.1 * torch.randn(n, length, generator=self.g) + 0.3 * torch.sin(t / 50)
        y = (beat > 0.5).long()
        off = torch.rand(n, generator=self.g) < lead_off
        x[off], y[off] = 0.0, 0
        return x.unsqueeze(1), y


def fit(steps=90):
    torch.manual_seed(0)
    data, net = Holter(4), SegNet()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
    for s in range(steps):
        x, y = data.batch(16, lead_off=0.0 if s < 25 else 0.2)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x).float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if s % 10 == 9:
            print(f"[{s + 1}/{steps}] ce={loss.item():.4f}")


fit()
