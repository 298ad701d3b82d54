import torch
import torch.nn as nn
import torch.nn.functional as F


class Seg(nn.Module):
    def __init__(self, ch=10):
        super().__init__()
        self.a = nn.Conv2d(1, ch, 3, padding=1)
        self.b = nn.Conv2d(ch, ch, 3, padding=2, dilation=2)
        self.c = nn.Conv2d(ch, 1, 1)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


def blobs(n, size=20):
    c = torch.rand(n, 2, 1, 1) * size
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    d = (yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2
    m = (d < 25).float().unsqueeze(1)
    return m + 0.7 * torch.randn_like(m), m


def dice(logit, mask):
    p = torch.sigmoid(logit.float())
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


def main(windows=45, every=4, clip=0.05):
    torch.manual_seed(0)
    net = Seg()
    opt = torch.optim.AdamW(net.parameters(), lr=8e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=15)
    opt.zero_grad()
    shown = 0.0
    for k in range(windows * every):
        x, m = blobs(4)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
            loss = (F.binary_cross_entropy_with_logits(out, m) + dice(out, m)) / every
        scaler.scale(loss).backward()
        shown += loss.item()
        if (k + 1) % every:
            continue
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        w = (k + 1) // every
        if w % 5 == 0:
            print(f"window {w} loss {shown / 5:.4f} norm {norm.item():.3f} scale {scaler.get_scale():g}")
            shown = 0.0


if __name__ == "__main__":
    main()
