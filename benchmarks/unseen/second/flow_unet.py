import torch
import torch.nn as nn
import torch.nn.functional as F


FLOW_UNIT = 2e-3


class Down(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.GroupNorm(4, b), nn.ReLU())


class Up(nn.Module):
    def __init__(self, a, skip, b):
        super().__init__()
        self.conv = nn.Conv2d(a + skip, b, 3, padding=1)

    def forward(self, x, skip):
        x = F.interpolate(x, scale_factor=2.0)
        return F.relu(self.conv(torch.cat([x, skip], 1)))


class FlowUNet(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.d1 = Down(ch, 2 * ch)
        self.u1 = Up(2 * ch, ch, ch)
        self.out = nn.Conv2d(ch, 2, 1)

    def forward(self, pair):
        a = F.relu(self.inp(pair))
        return FLOW_UNIT * self.out(self.u1(self.d1(a), a))


def views(n, g, size=24):
    """Image triples and their displacement as a fraction of a kilometre."""
    coarse = torch.randn(n, 2, 3, 3, generator=g)
    flow = FLOW_UNIT * F.interpolate(coarse, size=(size, size), mode="bilinear")
    first = torch.randn(n, 1, size, size, generator=g)
    left = first + 300 * flow[:, :1]
    right = first + 300 * flow[:, 1:]
    return torch.cat([first, left, right], 1), flow


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(7)
    model = FlowUNet()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-12)
    running = 0.0
    for step in range(100):
        x, flow = views(8, g)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
            loss = F.mse_loss(pred, flow)
        loss.backward()
        opt.step()
        running += loss.item()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1:3d}  epe^2 {running / 20:.3e}")
            running = 0.0


if __name__ == "__main__":
    main()
