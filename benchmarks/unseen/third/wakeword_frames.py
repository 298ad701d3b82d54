"""Small wake-word detector: learned filterbank, gain control, temporal convolution."""
import torch
from torch import nn
import torch.nn.functional as F

HOP, FRAMES, FILTERS = 64, 20, 24


class GainControl(nn.Module):
    def __init__(self, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, f):
        level = f.abs().mean(dim=-1, keepdim=True)
        return f / (level + self.eps)


class FrontEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.bank = nn.Linear(HOP, FILTERS, bias=False)
        self.agc = GainControl()

    def forward(self, wave):
        return self.agc(self.bank(wave.view(-1, FRAMES, HOP)))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = FrontEnd()
        self.temporal = nn.Sequential(nn.Conv1d(FILTERS, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 32, 3, padding=1), nn.ReLU())
        self.logit = nn.Linear(32, 1)

    def forward(self, wave):
        h = self.temporal(self.frontend(wave).transpose(1, 2))
        return self.logit(h.amax(-1)).squeeze(-1)


def clip_stream(total, batch, gen):
    """Yields (wave, label); short clips arrive zero filled to the common length."""
    t = torch.arange(HOP * FRAMES) / 256.0
    for i in range(total):
        y = (torch.rand(batch, generator=gen) < 0.5).float()
        f = 6 + 20 * torch.rand(batch, 1, generator=gen)
        tone = torch.sin(2 * torch.pi * (f * t + y[:, None] * 4.0 * t * t))
        wave = (0.1 + torch.rand(batch, 1, generator=gen)) * tone + 0.05 * torch.randn(batch, t.numel(), generator=gen)
        if i >= total // 3:
            cut = torch.randint(FRAMES // 2, FRAMES + 1, (batch, 1), generator=gen) * HOP
            wave = wave.masked_fill(torch.arange(t.numel())[None] >= cut, 0.0)
        yield wave, y


def main():
    torch.manual_seed(13)
    gen = torch.Generator().manual_seed(13)
    net = Detector()
    opt = torch.optim.AdamW(net.parameters(), lr=1.5e-3, weight_decay=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    ema = None
    for i, (w, y) in enumerate(clip_stream(240, 32, gen)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.binary_cross_entropy_with_logits(net(w), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        ema = loss.item() if ema is None else 0.9 * ema + 0.1 * loss.item()
        if i % 30 == 29:
            print(f"[{i + 1}] loss {ema:.4f}")


main()
