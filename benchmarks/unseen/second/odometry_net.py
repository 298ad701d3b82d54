import torch
import torch.nn as nn
import torch.nn.functional as F

DT = 0.01


class VelocityNet(nn.Module):
    def __init__(self, channels=6, width=48):
        super().__init__()
        self.enc = nn.Linear(channels, width)
        self.mid = nn.Linear(width, width)
        self.vel = nn.Linear(width, 2)

    def forward(self, imu):
        h = F.gelu(self.enc(imu))
        return self.vel(F.gelu(self.mid(h)))


def integrate(velocity):
    position = torch.zeros_like(velocity[:, 0])
    path = []
    for k in range(velocity.shape[1]):
        position = position + velocity[:, k] * DT
        if (k + 1) % 75 == 0:
            path.append(position)
    return torch.stack(path, 1)


def drives(n, mixing, steps=600):
    speed = 0.5 + 1.5 * torch.rand(n, 1, 1)
    side = 0.4 * torch.randn(n, 1, 1)
    v = torch.cat([speed, side], -1).expand(n, steps, 2)
    v = v + 0.1 * torch.randn(n, steps, 2)
    imu = v @ mixing + 0.05 * torch.randn(n, steps, 6)
    true = (v * DT).cumsum(1)[:, 74::75]
    return imu, true


def main():
    torch.manual_seed(0)
    mixing = torch.randn(2, 6)
    net = VelocityNet()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
    for step in range(60):
        imu, true = drives(16, mixing)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            path = integrate(net(imu))
        loss = F.mse_loss(path.float(), true)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 10 == 9:
            print(f"step {step + 1} path error {loss.item():.4f}")


if __name__ == "__main__":
    main()
