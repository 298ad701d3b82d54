import torch
import torch.nn as nn
import torch.nn.functional as F

NOISE = 0.8


class Fusion(nn.Module):
    def __init__(self, a=6, b=4, width=32):
        super().__init__()
        self.left = nn.Linear(a, width)
        self.right = nn.Linear(b, width)
        self.out = nn.Linear(2 * width, 1)

    def forward(self, xa, xb):
        h = torch.cat([torch.tanh(self.left(xa)), torch.tanh(self.right(xb))], -1)
        return self.out(h).squeeze(-1)


class Stream:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def read(self, n):
        a = torch.randn(n, 6, generator=self.g)
        b = torch.randn(n, 4, generator=self.g)
        y = torch.tanh(a[:, 0] - a[:, 1]) + 0.5 * b[:, 2]
        return a, b, y + NOISE * torch.randn(n, generator=self.g)


def main(steps=300):
    torch.manual_seed(0)
    stream, model = Stream(3), Fusion()
    opt = torch.optim.SGD(model.parameters(), lr=0.12)
    scaler = torch.amp.GradScaler("cpu")
    total = 0.0
    for s in range(steps):
        a, b, y = stream.read(256)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(a, b), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        total += loss.item()
        if s % 30 == 29:
            print(f"step {s + 1} mse {total / 30:.4f}")
            total = 0.0


if __name__ == "__main__":
    main()
