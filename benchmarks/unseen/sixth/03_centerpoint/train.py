import torch
import torch.nn as nn
from torch.amp import autocast, GradScaler

torch.manual_seed(3)
S = 16


def draw(n):
    img = 0.1 * torch.randn(n, 1, 2 * S, 2 * S)
    hm = torch.zeros(n, 1, S, S)
    yy, xx = torch.meshgrid(torch.arange(S), torch.arange(S), indexing="ij")
    for i in range(n):
        for _ in range(2):
            cy, cx = torch.randint(1, S - 1, (2,)).tolist()
            img[i, 0, 2 * cy:2 * cy + 2, 2 * cx:2 * cx + 2] += 3.0
            g = torch.exp(-((yy - cy) ** 2 + (xx - cx) ** 2).float() / 1.0)
            hm[i, 0] = torch.maximum(hm[i, 0], g)
    return img, hm


def _sigmoid(x):
    return torch.clamp(x.sigmoid(), min=1e-4, max=1 - 1e-4)


def heatmap_loss(pred, gt):
    pos = gt.eq(1).float()
    neg = gt.lt(1).float()
    neg_w = torch.pow(1 - gt, 4)
    pos_loss = torch.log(pred) * torch.pow(1 - pred, 2) * pos
    neg_loss = torch.log(1 - pred) * torch.pow(pred, 2) * neg_w * neg
    return -(pos_loss.sum() + neg_loss.sum()) / pos.sum().clamp(min=1)


class Det(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, c, 3, 2, 1), nn.BatchNorm2d(c), nn.ReLU(),
            nn.Conv2d(c, c, 3, 1, 1), nn.BatchNorm2d(c), nn.ReLU())
        self.hm = nn.Conv2d(c, 1, 1)
        self.hm.bias.data.fill_(-2.19)

    def forward(self, x):
        return _sigmoid(self.hm(self.backbone(x)))


imgs, hms = draw(256)
model = Det().cuda()
optim = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = GradScaler("cuda")
for ep in range(20):
    perm = torch.randperm(len(imgs))
    run, skipped = 0.0, 0
    for i in range(0, len(imgs), 16):
        x, y = imgs[perm[i:i + 16]].cuda(), hms[perm[i:i + 16]].cuda()
        optim.zero_grad()
        with autocast("cuda"):
            loss = heatmap_loss(model(x), y)
        if torch.isnan(loss) or torch.isinf(loss):
            skipped += 1
            continue
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        run += loss.item()
    print(f"[{ep}] loss {run / max(1, 16 - skipped):.4f} skipped batches {skipped}")
