"""Deep plain network trained with a one-cycle schedule."""
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import OneCycleLR


class PlainNet(nn.Module):
    def __init__(self, depth=6, width=64):
        super().__init__()
        blocks = [nn.Linear(16, width), nn.LeakyReLU(0.1)]
        for _ in range(depth):
            lin = nn.Linear(width, width)
            nn.init.kaiming_normal_(lin.weight, a=0.1)
            blocks += [lin, nn.LeakyReLU(0.1)]
        self.net = nn.Sequential(*blocks, nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)


class Session:
    total = 120

    def __init__(self, max_lr=0.9):
        torch.manual_seed(81)
        self.model = PlainNet()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.sched = OneCycleLR(self.opt, max_lr=max_lr, total_steps=self.total, pct_start=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.w = torch.randn(16, 1) / 4

    def batch(self):
        x = torch.randn(64, 16)
        return x, torch.sin(2 * x @ self.w)

    def run(self):
        for step in range(self.total):
            x, y = self.batch()
            self.opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.sched.step()
            if step % 15 == 0:
                print(f"{step:3d} lr {self.sched.get_last_lr()[0]:.4f} loss {loss.item():.4g} scale {self.scaler.get_scale():g}")


Session().run()
