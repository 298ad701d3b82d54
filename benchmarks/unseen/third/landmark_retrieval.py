"""Image retrieval with generalised-mean pooling and proxy loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(21)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class PowerPool(nn.Module):
    def forward(self, fmap):
        fmap = fmap.clamp(min=1e-3)
        return (fmap * fmap * fmap).mean(dim=(2, 3)).float().pow(1.0 / 3.0)


class Trunk(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, stride=2, padding=1)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(c, 2 * c, 3, stride=2, padding=1), nn.ReLU())
        self.pool = PowerPool()
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
                nn.init.zeros_(m.bias)

    def forward(self, x):
        return self.pool(self.body(self.stem(x)))


class Descriptor(nn.Module):
    def __init__(self, places, dim=32):
        super().__init__()
        self.trunk = Trunk()
        self.embed = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, dim))
        self.proxies = nn.Parameter(torch.randn(places, dim))

    def forward(self, x):
        z = F.normalize(self.embed(self.trunk(x)).float(), dim=-1)
        return z @ F.normalize(self.proxies, dim=-1).t() * 16.0


class Landmarks:
    """8-bit camera frames of a few places under exposure changes."""

    def __init__(self, places=6, size=24):
        self.base = torch.rand(places, 3, 4, 4)
        self.size = size

    def sample(self, n):
        y = torch.randint(0, len(self.base), (n,))
        img = F.interpolate(self.base[y], size=self.size, mode="bilinear")
        img = img * (0.7 + 0.3 * torch.rand(n, 1, 1, 1)) + 0.1 * torch.randn_like(img)
        return (img.clamp(0, 1) * 255).to(torch.uint8), y


def train(steps=200):
    data, model = Landmarks(), Descriptor(6).to(DEVICE)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=steps)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
    for i in range(steps):
        img, y = data.sample(24)
        img, y = img.to(DEVICE).float(), y.to(DEVICE)
        with torch.autocast(DEVICE, dtype=torch.float16):
            logits = model(img)
            loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        sched.step()
        if i % 25 == 0 or i == steps - 1:
            acc = (logits.argmax(-1) == y).float().mean().item()
            print(f"{i:4d} loss={loss.item():.4f} acc={acc:.2f}")


train()
