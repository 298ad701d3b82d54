import torch
import torch.nn as nn
import torch.nn.functional as F


class CausalConv(nn.Module):
    def __init__(self, a, b, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(a, b, 3, dilation=dilation)

    def forward(self, x):
        return self.conv(F.pad(x, (self.pad, 0)))


class TCN(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.layers = nn.ModuleList([CausalConv(1, ch, 1), CausalConv(ch, ch, 2), CausalConv(ch, ch, 4)])
        self.out = nn.Linear(ch, 1)

    def forward(self, x):
        h = x.unsqueeze(1)
        for layer in self.layers:
            h = F.relu(layer(h))
        return self.out(h[:, :, -1]).squeeze(-1)


class Runner:
    def __init__(self, model, lr, max_value):
        self.model, self.max_value = model, max_value
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)

    def backward(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_value_(self.model.parameters(), self.max_value)

    def apply(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train_step(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.smooth_l1_loss(self.model(x), y)
        self.backward(loss)
        self.apply()
        return loss.detach()


def windows(n, length=32):
    f = 0.1 + 0.3 * torch.rand(n, 1)
    ph = 6.28 * torch.rand(n, 1)
    t = torch.arange(length + 1)
    s = torch.sin(f * t + ph) + 0.05 * torch.randn(n, length + 1)
    return s[:, :-1], s[:, -1]


if __name__ == "__main__":
    torch.manual_seed(3)
    runner = Runner(TCN(), lr=0.05, max_value=1.0)
    total = 0.0
    for step in range(1, 151):
        total += runner.train_step(*windows(32)).item()
        if step % 25 == 0:
            print(f"{step} huber {total / 25:.4f}")
            total = 0.0
