import torch
import torch.nn as nn
import torch.nn.functional as F


def rings(n):
    y = torch.randint(3, (n,))
    r = 0.5 + y.float() + 0.12 * torch.randn(n)
    th = 6.2832 * torch.rand(n)
    return torch.stack([r * th.cos(), r * th.sin()], 1), y


class Classifier(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 3))

    def forward(self, x):
        return self.net(x)


class RobustTrainer:
    def __init__(self, model, smooth=0.05, lr=1e-2):
        self.model, self.smooth = model, smooth
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)

    def sensitivity(self, loss, x):
        (g,) = torch.autograd.grad(self.scaler.scale(loss), x, create_graph=True)
        return (g.float() * len(x)).square().sum(1).mean()

    def step(self, x, y):
        x = x.requires_grad_(True)
        with torch.autocast("cpu", dtype=torch.float16):
            ce = F.cross_entropy(self.model(x), y)
        total = ce + self.smooth * self.sensitivity(ce, x)
        self.opt.zero_grad()
        self.scaler.scale(total).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return ce.item(), total.item()


def main():
    torch.manual_seed(0)
    tr = RobustTrainer(Classifier())
    for i in range(300):
        ce, total = tr.step(*rings(128))
        if i % 50 == 49:
            print(f"step {i + 1} ce {ce:.4f} total {total:.4g} scale {tr.scaler.get_scale():g}")


if __name__ == "__main__":
    main()
