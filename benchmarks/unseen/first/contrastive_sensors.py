"""Two-view contrastive pretraining on raw 12 bit sensor frames."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)


class UnitLength(nn.Module):
    def forward(self, z):
        return z / torch.sqrt((z * z).sum(dim=-1, keepdim=True))


class Encoder(nn.Module):
    def __init__(self, n_in=32, width=96, out=64):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.projector = nn.Linear(width, out)
        self.unit = UnitLength()

    def forward(self, x):
        return self.unit(self.projector(self.backbone(x)))


def info_nce(a, b, temperature=0.2):
    logits = a @ b.t() / temperature
    target = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def frames(n):
    latent = torch.randn(n, 12)
    lift = frames.lift
    base = 2048 + 600 * latent @ lift
    jitter = lambda: 120 * torch.randn(n, 32)
    return (base + jitter()).clamp(0, 4095), (base + jitter()).clamp(0, 4095)


frames.lift = torch.randn(12, 32) / 12 ** 0.5

net = Encoder()
for m in net.modules():
    if isinstance(m, nn.Linear):
        nn.init.kaiming_normal_(m.weight)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
history = []
for step in range(120):
    u, v = frames(32)
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        loss = info_nce(net(u), net(v))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    history.append(loss.item())
    if (step + 1) % 20 == 0:
        print(step + 1, sum(history[-20:]) / 20)
