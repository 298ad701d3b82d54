"""Fine-tuning: frozen lower layers, adapters starting at zero, long warm-up from lr 0."""
from dataclasses import dataclass
import torch
from torch import nn


@dataclass
class C:
    width: int = 64
    rank: int = 4
    steps: int = 240
    hold: int = 25
    ramp: int = 25
    lr: float = 6e-3


class Adapter(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Sparse(nn.Module):
    """Pretrained feature layer; most units stay silent."""

    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o)
        nn.init.constant_(self.lin.bias, -0.1)
        with torch.no_grad():
            self.lin.bias[: o // 3] = -40.0

    def forward(self, x):
        return torch.relu(self.lin(x))


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.words = nn.Embedding(500, c.width)
        self.low = Sparse(c.width, c.width)
        self.mid = Adapter(nn.Linear(c.width, c.width), c.rank)
        self.high = nn.Sequential(Sparse(c.width, c.width), nn.Linear(c.width, 3))
        self.unused = nn.Linear(c.width, c.width)
        self.low.requires_grad_(False)

    def forward(self, ids):
        return self.high(self.mid(self.low(self.words(ids).mean(1) * 8)))


def rate(c):
    def f(step):
        if step < c.hold:
            return 0.0
        return min(1.0, (step - c.hold) / c.ramp)
    return f


def main(c):
    torch.manual_seed(46)
    net = Net(c)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=c.lr * 10, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, rate(c))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=100)
    for s in range(c.steps):
        y = torch.randint(0, 3, (32,))
        ids = torch.where(torch.rand(32, 12) < 0.4, y[:, None] * 20 + torch.randint(0, 20, (32, 12)), torch.randint(60, 300, (32, 12)))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(ids), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        sched.step()
        if s % 24 == 0 or s == c.steps - 1:
            print(f"{s} lr {opt.param_groups[0]['lr']:.4f} loss {loss.item():.4f}")


main(C())
