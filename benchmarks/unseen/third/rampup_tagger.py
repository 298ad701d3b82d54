"""Image tagger; counts the images seen per class, and the learning rate follows the total."""
import torch
from torch import nn
import torch.nn.functional as F


class Progress(nn.Module):
    """Counts what the model has been trained on; travels with the checkpoint."""

    def __init__(self, classes, horizon):
        super().__init__()
        self.horizon = horizon
        self.register_buffer("seen", torch.zeros(classes))

    @torch.no_grad()
    def advance(self, y):
        self.seen.index_add_(0, y, torch.ones_like(y, dtype=self.seen.dtype))

    @property
    def fraction(self):
        return min(1.0, self.seen.float().sum().item() / self.horizon)


class Backbone(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, c, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(c, c, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())

    def forward(self, x):
        return self.net(x)


class Tagger(nn.Module):
    def __init__(self, classes, horizon):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(96, classes)
        self.progress = Progress(classes, horizon)

    def forward(self, x):
        return self.head(self.backbone(x))


def to_storage(module, dtype=torch.bfloat16):
    """Buffers are stored compactly, parameters stay as they are."""
    for m in module.modules():
        for k, b in m._buffers.items():
            if b is not None and b.is_floating_point():
                m._buffers[k] = b.to(dtype)
    return module


class RampSchedule:
    def __init__(self, opt, progress, peak):
        self.opt, self.progress, self.peak = opt, progress, peak

    def step(self):
        lr = self.peak * self.progress.fraction ** 2
        for g in self.opt.param_groups:
            g["lr"] = lr
        return lr


def images(n, base):
    y = torch.randint(0, len(base), (n,))
    return base[y] + 1.2 * torch.randn(n, 3, 16, 16), y


def main(steps=300, batch=64):
    torch.manual_seed(19)
    base = F.interpolate(torch.randn(10, 3, 4, 4), size=16)
    net = to_storage(Tagger(10, horizon=16000))
    opt = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    sched = RampSchedule(opt, net.progress, peak=0.04)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i in range(steps):
        x, y = images(batch, base)
        lr = sched.step()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        net.progress.advance(y)
        if i % 30 == 0 or i == steps - 1:
            print(f"{i:3d} lr {lr:.5f} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
