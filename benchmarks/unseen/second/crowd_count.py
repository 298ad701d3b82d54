import torch
import torch.nn as nn
import torch.nn.functional as F

GAIN = 1000.0


class CountNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
            nn.Conv2d(8, 1, 1))

    def forward(self, x):
        return F.softplus(self.body(x))


def scene(n, people, g):
    dots = torch.zeros(n, 1, 44, 44)
    for i in range(n):
        k = int(torch.randint(people[0], people[1], (1,), generator=g))
        pos = torch.randint(44, (k, 2), generator=g)
        dots[i, 0].index_put_((pos[:, 0], pos[:, 1]), torch.ones(k), accumulate=True)
    kernel = torch.tensor([1.0, 2.0, 1.0])
    kernel = (kernel.unsqueeze(1) * kernel / 16).view(1, 1, 3, 3)
    density = F.conv2d(dots, kernel, padding=1)
    img = density * 4 + 0.02 * torch.randn(density.shape, generator=g)
    return img, density * GAIN


def criterion(pred, target):
    pixel = F.mse_loss(pred, target) / GAIN
    count = pred.sum(dim=(1, 2, 3))
    true = target.sum(dim=(1, 2, 3))
    return pixel + 0.05 * F.mse_loss(count / GAIN, true / GAIN)


def run(steps=80):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    model = CountNet()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(steps):
        people = (5, 35) if step < 22 else (60, 160)
        x, t = scene(6, people, g)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
            loss = criterion(pred, t)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 8 == 7:
            print(f"step {step + 1} loss {loss.item():.3f} scale {scaler.get_scale():.3g}")


if __name__ == "__main__":
    run()
