import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.a = nn.Linear(dim, dim)
        self.b = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.b(F.relu(self.a(x)))


class Upscaler(nn.Module):
    """Maps raw 16-bit sensor patches to patches of twice the side."""

    def __init__(self, side=6, dim=96):
        super().__init__()
        self.inp = nn.Linear(side * side, dim)
        self.blocks = nn.ModuleList(ResBlock(dim) for _ in range(3))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 4 * side * side)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.orthogonal_(m.weight)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h)
        return self.out(self.norm(h))


def patches(n, side=6):
    t = torch.linspace(0, 1, 2 * side)
    p = torch.rand(n, 4, 1, 1)
    hi = torch.sin(4 * p[:, 0] * t.view(1, -1, 1) + 6 * p[:, 1]) * torch.cos(4 * p[:, 2] * t.view(1, 1, -1) + 6 * p[:, 3])
    lo = F.avg_pool2d(hi.unsqueeze(1), 2)
    return (16000 + 15000 * lo).flatten(1), hi.flatten(1)


def psnr(model, x, y):
    with torch.no_grad():
        err = (model(x).float() - y).square().mean()
    return (10 * torch.log10(4.0 / err)).item()


def main(steps=250):
    torch.manual_seed(0)
    model = Upscaler()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    x_val, y_val = patches(256)
    for s in range(steps):
        x, y = patches(64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 50 == 49:
            deploy = copy.deepcopy(model).half().eval()
            print(f"step {s + 1} train {loss.item():.4f} val psnr {psnr(deploy, x_val.half(), y_val):.2f}")


if __name__ == "__main__":
    main()
