"""Segment round cells; U-Net with BatchNorm, cross entropy plus soft Dice."""
from __future__ import annotations

import torch
from torch import nn, Tensor
import torch.nn.functional as F


def conv_bn(cin: int, cout: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU())


class Up(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(cin, cout, 1)
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, low: Tensor, skip: Tensor) -> Tensor:
        low = F.interpolate(low, scale_factor=2, mode="nearest")
        x = torch.cat([low, skip], dim=1)
        x = F.relu(self.bn(self.reduce(x)))
        return x


class UNet(nn.Module):
    def __init__(self, ch: int = 6, classes: int = 2) -> None:
        super().__init__()
        self.down1 = conv_bn(1, ch)
        self.down2 = conv_bn(ch, 2 * ch)
        self.bottom = nn.Conv2d(2 * ch, 2 * ch, 3, padding=1)
        self.up = Up(3 * ch, ch)
        self.head = nn.Conv2d(ch, classes, 1)

    def forward(self, img: Tensor) -> Tensor:
        a = self.down1(img)
        b = self.down2(F.max_pool2d(a, 2))
        b = F.relu(self.bottom(b))
        return self.head(self.up(b, a))


def synth(n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    ax = torch.arange(12.0)
    cy, cx = torch.rand(2, n, 1, 1, generator=rng) * 8 + 2
    radius = torch.rand(n, 1, 1, generator=rng) * 2 + 1.5
    mask = ((ax[None, :, None] - cy) ** 2 + (ax[None, None, :] - cx) ** 2) < radius**2
    img = mask.float() + 0.4 * torch.randn(n, 12, 12, generator=rng)
    return img.unsqueeze(1), mask.long()


def dice_loss(logits: Tensor, target: Tensor) -> Tensor:
    prob = torch.softmax(logits.float(), dim=1)[:, 1]
    hit = (prob * target).sum(dim=(1, 2))
    size = prob.sum(dim=(1, 2)) + target.sum(dim=(1, 2))
    return (1 - (2 * hit + 1) / (size + 1)).mean()


def criterion(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target) + 0.5 * dice_loss(logits, target)


def fit(iters: int = 48, batch: int = 8, lr: float = 0.08, accumulate: int = 2) -> None:
    torch.manual_seed(9)
    rng = torch.Generator().manual_seed(9)
    net = UNet()
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for i in range(2 * iters):
        img, target = synth(batch, rng)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(img)
            loss = criterion(out, target)
        scaler.scale(loss / accumulate).backward()
        if i % 24 == 0:
            print(f"iter {i:3d} | loss {loss.item():.4f}")
        if (i + 1) % accumulate == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
    net.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        img, target = synth(32, rng)
        final = criterion(net(img), target)
    print(f"validation | loss {final.item():.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fit()
