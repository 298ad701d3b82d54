"""Character recogniser on synthetic strokes with a shared precision helper."""
import torch
from torch import nn
import torch.nn.functional as F


class PrecisionManager:
    """Keeps all mixed-precision handling in one place."""

    def __init__(self, device="cpu", dtype=torch.float16, start=2.0 ** 16, keep_above=None):
        self.device, self.dtype = device, dtype
        self.scaler = torch.amp.GradScaler(device, init_scale=start)
        self.keep_above = keep_above
        self.steps = 0

    def context(self):
        return torch.autocast(self.device, dtype=self.dtype)

    def minimise(self, loss, optimizer):
        optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.steps += 1
        if self.keep_above is not None and self.steps > 60:
            self.scaler.update(max(self.scaler.get_scale(), self.keep_above))


class StrokeNet(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(2, 24, 5, stride=2), nn.GELU(), nn.Conv1d(24, 48, 5, stride=2), nn.GELU())
        self.fc = nn.Linear(48, classes + 1)

    def forward(self, xy):
        return self.fc(self.conv(xy).transpose(1, 2))


shapes = None


def strokes(n, rng):
    """Each sample draws two glyphs, one after the other."""
    global shapes
    t = torch.linspace(0, 6.283, 30)
    if shapes is None:
        k = torch.randint(1, 5, (8, 2), generator=rng).float()
        ph = torch.rand(8, 2, generator=rng) * 6.283
        shapes = torch.sin(k[..., None] * t + ph[..., None])
    y = torch.randint(0, 8, (n, 2), generator=rng)
    x = torch.cat([shapes[y[:, 0]], shapes[y[:, 1]]], dim=-1)
    return x + 0.15 * torch.randn(x.shape, generator=rng), y


def main(steps=300):
    torch.manual_seed(6)
    rng = torch.Generator().manual_seed(6)
    net = StrokeNet()
    amp = PrecisionManager(keep_above=2.0 ** 24)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for i in range(steps):
        x, y = strokes(32, rng)
        with amp.context():
            lp = net(x).float().log_softmax(-1).transpose(0, 1)
        lens = torch.full((32,), lp.size(0))
        loss = F.ctc_loss(lp, y + 1, lens, torch.full((32,), 2), zero_infinity=True)
        amp.minimise(loss, opt)
        if i % 30 == 0 or i == steps - 1:
            print(f"{i:3d}  ctc {loss.item():.4f}")


main()
