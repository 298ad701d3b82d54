import argparse
import torch
from torch import nn
import torch.nn.functional as F


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--accum", type=int, default=8)
    p.add_argument("--micro", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--clip", type=float, default=2.0)
    p.add_argument("--updates", type=int, default=50)
    return p.parse_args()


class UNetS(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        cb = lambda i, o, s=1: nn.Sequential(nn.Conv2d(i, o, 3, s, 1), nn.GroupNorm(4, o), nn.ReLU())
        self.e1, self.e2, self.mid = cb(1, w), cb(w, 2 * w, 2), cb(2 * w, 2 * w)
        self.d1 = cb(3 * w, w)
        self.seg = nn.Conv2d(w, 3, 1)

    def forward(self, x):
        a = self.e1(x)
        b = self.mid(self.e2(a))
        return self.seg(self.d1(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1)))


def scenes(n, s=16):
    yy, xx = torch.meshgrid(torch.arange(s), torch.arange(s), indexing="ij")
    y = torch.zeros(n, s, s, dtype=torch.long)
    for c in (1, 2):
        cy, cx, r = (torch.rand(3, n, 1, 1) * torch.tensor([s, s, 4.]).view(3, 1, 1, 1) + torch.tensor([0, 0, 3.]).view(3, 1, 1, 1))
        d = (yy - cy).abs() + (xx - cx).abs() if c == 1 else ((yy - cy) ** 2 + (xx - cx) ** 2).sqrt()
        y[d < r] = c
    x = (y > 0).float()[:, None] * 1.0 + 0.4 * (y == 2).float()[:, None] + 0.5 * torch.randn(n, 1, s, s)
    return x, y


def main(a):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = UNetS().to(device)
    opt = torch.optim.SGD(net.parameters(), lr=a.lr, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    hist = []
    opt.zero_grad()
    for i in range(a.updates * a.accum):
        x, y = scenes(a.micro)
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(net(x.to(device)), y.to(device)) / a.accum
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        gn = nn.utils.clip_grad_norm_(net.parameters(), a.clip)
        if (i + 1) % a.accum == 0:
            scaler.step(opt)
            opt.zero_grad()
        scaler.update()
        hist.append(loss.item() * a.accum)
        if (i + 1) % (10 * a.accum) == 0:
            print("update", (i + 1) // a.accum, "ce %.4f" % (sum(hist[-40:]) / 40), "gnorm %.4f" % float(gn))


if __name__ == "__main__":
    main(get_args())
