"""Per-pixel aerosol optical depth from multispectral patches (small physical units)."""
from dataclasses import dataclass, field
import torch
from torch import nn


@dataclass
class Precision:
    mode: str = "16-mixed"

    @property
    def autocast_dtype(self):
        return torch.bfloat16 if "bf16" in self.mode else torch.float16

    @property
    def wants_scaler(self):
        return self.mode in ("fp16", "float16", "amp16")


@dataclass
class Setup:
    steps: int = 150
    batch: int = 8
    patch: int = 32
    lr: float = 2e-3
    units: float = 1e-2
    precision: Precision = field(default_factory=Precision)


class Patches:
    def __init__(self, setup):
        self.s = setup
        self.mix = torch.randn(6)

    def __iter__(self):
        for _ in range(self.s.steps):
            x = torch.randn(self.s.batch, 6, self.s.patch, self.s.patch)
            depth = torch.sigmoid((x * self.mix[None, :, None, None]).sum(1, keepdim=True))
            yield x, depth * self.s.units


class Retrieval(nn.Module):
    def __init__(self, units, c=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(6, c, 3, padding=1), nn.GELU(), nn.Conv2d(c, c, 1), nn.GELU())
        self.out = nn.Conv2d(c, 1, 1)
        self.units = units

    def forward(self, x):
        return self.out(self.enc(x)).float() * self.units


def fit(setup):
    torch.manual_seed(8)
    net, prec = Retrieval(setup.units), setup.precision
    opt = torch.optim.Adam(net.parameters(), lr=setup.lr, eps=1e-20)
    scaler = torch.amp.GradScaler("cpu", enabled=prec.wants_scaler)
    base = None
    for i, (x, y) in enumerate(Patches(setup)):
        with torch.autocast("cpu", dtype=prec.autocast_dtype):
            loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        base = base or y.var().item()
        if i % 15 == 0 or i == setup.steps - 1:
            print(f"step {i} loss {loss.item():.3e} ({loss.item() / base:.3f} of variance)")


if __name__ == "__main__":
    fit(Setup())
