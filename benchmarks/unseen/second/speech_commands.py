import argparse
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


def synth(labels, level, n=1600):
    t = torch.arange(n) / 8000.0
    f = 180.0 * (labels.float() + 1).unsqueeze(1)
    phase = torch.rand(len(labels), 1) * 2 * math.pi
    amp = level[0] + (level[1] - level[0]) * torch.rand(len(labels), 1)
    wave = amp * torch.sin(2 * math.pi * f * t + phase) + 0.05 * amp * torch.randn(len(labels), n)
    return wave.clamp(-32768, 32767).to(torch.int16)


class Recordings:
    """Two recording campaigns, read one after the other."""

    def __init__(self, batch, n_classes):
        self.batch, self.n_classes = batch, n_classes

    def __iter__(self):
        for level, count in (((300, 2500), 24), ((20000, 31000), 36)):
            for _ in range(count):
                y = torch.randint(self.n_classes, (self.batch,))
                yield synth(y, level), y


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 80, stride=16, bias=False)
        nn.init.kaiming_normal_(self.stem.weight, nonlinearity="relu")
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv1d(width, width * 2, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, width * 2)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        return F.relu(self.norm2(self.conv(x)))


class CommandNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(64, n_classes)

    def forward(self, wav):
        h = self.encoder(wav.float().unsqueeze(1))
        return self.head(h.mean(-1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--batch", type=int, default=32)
    args = ap.parse_args()
    torch.manual_seed(0)
    model = CommandNet(8)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    recent = []
    for step, (wav, y) in enumerate(Recordings(args.batch, 8)):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(wav).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        recent.append(loss.item())
        if step % 6 == 5:
            print(f"step {step + 1:3d} loss {sum(recent) / len(recent):.4f} scale {scaler.get_scale():g}")
            recent = []


if __name__ == "__main__":
    main()
