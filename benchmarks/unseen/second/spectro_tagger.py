import math
import torch
import torch.nn as nn
import torch.nn.functional as F

SR, NFFT, HOP = 8000, 1024, 512


def dft_basis(n):
    t = torch.arange(n).float()
    k = torch.arange(n // 4).float()
    ang = 2 * math.pi * k.unsqueeze(1) * t / n
    win = torch.hann_window(n)
    return (torch.cos(ang) * win), (torch.sin(ang) * win)


COS, SIN = dft_basis(NFFT)


def log_power(wave):
    frames = wave.unfold(-1, NFFT, HOP)
    re = F.linear(frames, COS)
    im = F.linear(frames, SIN)
    power = re.square() + im.square()
    return torch.log(power + 1e-3)


class Tagger(nn.Module):
    def __init__(self, tags=6):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(NFFT // 4), nn.Linear(NFFT // 4, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, tags)

    def forward(self, wave):
        h = self.net(log_power(wave))
        return self.head(h.mean(1))


def clip_batch(n, tags=6):
    y = (torch.rand(n, tags) < 0.3).float()
    t = torch.arange(4096) / SR
    freqs = torch.tensor([150.0, 310.0, 470.0, 700.0, 1100.0, 1600.0])
    tones = torch.sin(2 * math.pi * freqs.unsqueeze(1) * t)
    wave = y @ tones + 0.05 * torch.randn(n, 4096)
    wave = wave / wave.abs().amax(1, keepdim=True)
    return wave * 1.2, y


if __name__ == "__main__":
    torch.manual_seed(5)
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    for it in range(60):
        wave, y = clip_batch(32)
        opt.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.float16):
            logits = model(wave)
            loss = F.binary_cross_entropy_with_logits(logits, y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if it % 10 == 0 or it == 59:
            print(f"it {it:3d} bce {loss.item():.4f}")
