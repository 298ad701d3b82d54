"""ResNet with BatchNorm on synthetic textures; a Trainer class, gradient accumulation."""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    epochs: int = 4
    iters_per_epoch: int = 24
    accum: int = 2
    batch: int = 12
    lr: float = 0.1
    momentum: float = 0.9
    clip: float = 2.0
    classes: int = 4
    seed: int = 3


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.short = nn.Conv2d(cin, cout, 1, stride, bias=False) if stride != 1 or cin != cout else nn.Identity()

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = out + self.short(x)
        return F.relu(out)


class SmallResNet(nn.Module):
    def __init__(self, num_classes, width=6):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.layer1 = BasicBlock(width, width)
        self.layer2 = BasicBlock(width, 2 * width, stride=2)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, images):
        h = F.relu(self.bn(self.stem(images)))
        h = self.layer2(self.layer1(h))
        h = h.mean(dim=(2, 3))
        return self.fc(h)


class Textures:
    """Oriented gratings; the label is the orientation."""

    def __init__(self, classes, size=8, seed=0):
        self.gen = torch.Generator().manual_seed(seed)
        self.classes, self.size = classes, size

    def sample(self, n):
        labels = torch.randint(self.classes, (n,), generator=self.gen)
        angle = labels.float() * torch.pi / self.classes
        axis = torch.linspace(-1, 1, self.size)
        phase = 6.28 * torch.rand(n, 1, 1, generator=self.gen)
        xx, yy = torch.meshgrid(axis, axis, indexing="ij")
        wave = angle.cos().view(-1, 1, 1) * xx + angle.sin().view(-1, 1, 1) * yy
        images = torch.sin(6 * wave + phase) + 0.3 * torch.randn(n, self.size, self.size, generator=self.gen)
        return images.unsqueeze(1), labels


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(cfg.seed)
        self.data = Textures(cfg.classes, seed=cfg.seed)
        self.net = SmallResNet(cfg.classes)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=cfg.lr, momentum=cfg.momentum, nesterov=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        self.criterion = nn.CrossEntropyLoss()

    def train_epoch(self, epoch):
        self.net.train()
        total = 0.0
        self.opt.zero_grad()
        for i in range(self.cfg.iters_per_epoch):
            images, labels = self.data.sample(self.cfg.batch)
            with torch.autocast("cpu", dtype=torch.float16):
                outputs = self.net(images)
                loss = self.criterion(outputs, labels) / self.cfg.accum
            self.scaler.scale(loss).backward()
            if (i + 1) % self.cfg.accum == 0:
                self.scaler.unscale_(self.opt)
                nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg.clip)
                self.scaler.step(self.opt)
                self.scaler.update()
                self.opt.zero_grad()
            total += loss.item() * self.cfg.accum
            if i == 0 and epoch == 0:
                print(f"start: loss={total:.4f}")
        print(f"epoch {epoch} train loss={total / self.cfg.iters_per_epoch:.4f}")

    @torch.no_grad()
    def evaluate(self):
        self.net.eval()
        images, labels = self.data.sample(64)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.criterion(self.net(images), labels)
        print(f"held-out loss={loss.item():.4f}")

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.train_epoch(epoch)
        self.evaluate()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(Config()).fit()
