import math
import torch
import torch.nn as nn


class Field(nn.Module):
    """u(x) with u(0) = u(1) = 0 built in."""

    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return x * (1 - x) * self.net(2 * x - 1).float()


def residual(model, x):
    x = x.requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u = model(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    force = math.pi * torch.cos(math.pi * x)
    return (du - force).square().mean()


def main(steps=120):
    torch.manual_seed(0)
    model = Field()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    grid = torch.linspace(0, 1, 101).unsqueeze(1)
    for s in range(steps):
        x = torch.rand(96, 1)

        def closure():
            opt.zero_grad()
            loss = residual(model, x)
            loss.backward()
            return loss

        loss = opt.step(closure)
        sched.step()
        if s % 20 == 19:
            with torch.no_grad():
                err = (model(grid) - torch.sin(math.pi * grid)).abs().max().item()
            print(f"step {s + 1} residual {loss.item():.5f} max error {err:.4f}")


if __name__ == "__main__":
    main()
