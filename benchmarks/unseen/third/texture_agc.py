"""Normaliser-free texture classifier with per-unit gradient limits."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def unit_norm(t):
    return t.norm() if t.dim() <= 1 else t.flatten(1).norm(dim=1).view(-1, *[1] * (t.dim() - 1))


class UnitLimiter:
    """Limits each unit's gradient relative to the size of its weights."""

    def __init__(self, module, ratio=0.08, eps=1e-3, skip=("classifier",)):
        self.params = [p for n, p in module.named_parameters() if not n.startswith(skip)]
        self.ratio, self.eps = ratio, eps

    @torch.no_grad()
    def __call__(self):
        for p in self.params:
            if p.grad is None:
                continue
            limit = unit_norm(p).clamp(min=self.eps) * self.ratio
            size = unit_norm(p.grad)
            p.grad.mul_(torch.where(size > limit, limit / size.clamp(min=1e-6), torch.ones_like(size)))


class NFBlock(nn.Module):
    def __init__(self, c, alpha=0.5):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.alpha = alpha

    def forward(self, x):
        return x + self.alpha * self.c2(F.gelu(self.c1(F.gelu(x))))


class NFNet(nn.Module):
    def __init__(self, c=16, classes=6):
        super().__init__()
        self.stem = nn.Conv2d(1, c, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(NFBlock(c), NFBlock(c))
        self.neck = nn.Linear(c, 32)
        self.classifier = nn.Linear(32, classes)
        nn.init.zeros_(self.classifier.bias)
        self.classifier.weight.requires_grad_(False)

    def forward(self, x):
        h = self.blocks(self.stem(x)).mean((2, 3))
        return self.classifier(F.gelu(self.neck(h)) * 4)


def textures(n):
    y = torch.randint(0, 6, (n,))
    g = torch.arange(16.0)
    ang = y.float() * torch.pi / 6
    u = torch.cos(ang)[:, None, None] * g[None, :, None] + torch.sin(ang)[:, None, None] * g[None, None, :]
    img = torch.sin(1.6 * u + torch.rand(n, 1, 1) * 6.283) + 0.3 * torch.randn(n, 16, 16)
    return img.unsqueeze(1), y


def main():
    torch.manual_seed(31)
    net = NFNet()
    limiter = UnitLimiter(net)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.3, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    run = 0.0
    for it in range(1, 301):
        x, y = textures(32)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        limiter()
        scaler.step(opt)
        scaler.update()
        run += loss.item()
        if it % 30 == 0:
            print(f"iteration {it} mean loss {run / 30:.4f}")
            run = 0.0


if __name__ == "__main__":
    main()
