import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


class Residual(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.n1, self.n2 = nn.BatchNorm2d(ch), nn.BatchNorm2d(ch)
        nn.init.zeros_(self.n2.weight)

    def forward(self, x):
        return F.relu(x + self.n2(self.c2(F.relu(self.n1(self.c1(x))))))


class ResNet(nn.Module):
    def __init__(self, ch=12, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Residual(ch), Residual(ch))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(ch, classes)

    def forward(self, x):
        return self.head(self.drop(self.blocks(self.stem(x)).mean((2, 3))))


def stripes(n, size=16):
    y = torch.randint(4, (n,))
    ang = y.float().view(-1, 1, 1) * 0.785
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    phase = 6.28 * torch.rand(n, 1, 1)
    img = torch.sin((xx * ang.cos() + yy * ang.sin()) * 1.2 + phase)
    return (img + 0.3 * torch.randn(n, size, size)).unsqueeze(1), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--amp", choices=["bf16", "fp16"], default="bf16")
    ap.add_argument("--steps", type=int, default=90)
    args = ap.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.amp == "bf16" else torch.float16
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp == "fp16")
    model = ResNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    for s in range(args.steps):
        x, y = stripes(24)
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if s % 10 == 9:
            print(f"step {s + 1} loss {loss.item():.4f} scale {scaler.get_scale()}")
    model.eval()
    x, y = stripes(128)
    with torch.no_grad():
        print("val loss", round(F.cross_entropy(model(x), y).item(), 4))


if __name__ == "__main__":
    main()
