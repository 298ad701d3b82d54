"""Keyword spotting from raw PCM: fixed filter bank, gated recurrence, studio phase then field phase."""
import argparse
import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from _wave import Keywords


class FilterBank(nn.Module):
    """Windowed cosine/sine filters over frames of the waveform, then log magnitude."""

    def __init__(self, frame=160, bins=24):
        super().__init__()
        t = torch.arange(frame) / 8000
        f = torch.linspace(120, 900, bins)[:, None]
        window = torch.hann_window(frame)
        basis = torch.cat([torch.cos(2 * math.pi * f * t), torch.sin(2 * math.pi * f * t)]) * window
        self.frame = frame
        self.proj = nn.Linear(frame, 2 * bins, bias=False)
        self.proj.weight.data.copy_(basis)
        self.proj.weight.requires_grad_(False)

    def forward(self, wave):
        frames = wave.float().unfold(1, self.frame, self.frame)
        re, im = self.proj(frames).float().chunk(2, -1)
        return torch.log1p(re.abs() + im.abs())


class Cell(nn.Module):
    def __init__(self, n_in, width):
        super().__init__()
        self.gates = nn.Linear(n_in + width, 2 * width)
        self.cand = nn.Linear(n_in + width, width)

    def forward(self, x, h):
        r, z = torch.sigmoid(self.gates(torch.cat([x, h], -1))).chunk(2, -1)
        c = torch.tanh(self.cand(torch.cat([x, r * h], -1)))
        return (1 - z) * h + z * c


class Spotter(nn.Module):
    def __init__(self, words, bins=24, width=40):
        super().__init__()
        self.bank = FilterBank(bins=bins)
        self.norm = nn.LayerNorm(bins)
        self.cell = Cell(bins, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, words))
        self.width = width

    def scan(self, x, h):
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h

    def forward(self, wave):
        x = self.norm(self.bank(wave))
        h = x.new_zeros(x.shape[0], self.width)
        return self.head(checkpoint(self.scan, x, h, use_reentrant=False))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.data = Keywords(seed=args.seed)
        self.model = Spotter(self.data.n_words)
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.fp16, init_scale=2.0 ** 12)

    def optimizer(self, lr):
        head = list(self.model.head.parameters())
        rest = [p for n, p in self.model.named_parameters() if p.requires_grad and not n.startswith("head")]
        return torch.optim.Adam([{"params": head, "lr": lr}, {"params": rest, "lr": lr}])

    def loss(self, wave, word):
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16):
            logits = self.model(wave)
        logits = logits.float()
        return (nn.functional.cross_entropy(logits, word, label_smoothing=0.05)
                + 1e-4 * logits.logsumexp(-1).pow(2).mean()), (logits.argmax(-1) == word).float().mean()

    def phase(self, name, steps, level, lr):
        opt = self.optimizer(lr)
        total = hits = 0.0
        for i in range(steps):
            loss, acc = self.loss(*self.data.batch(self.args.batch, level))
            opt.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(self.model.parameters(), 3.0)
            self.scaler.step(opt)
            self.scaler.update()
            total, hits = total + loss.item(), hits + acc.item()
            if (i + 1) % 20 == 0:
                print(f"{name} {i + 1:4d}  loss {total / 20:.4f}  accuracy {hits / 20:.3f}", flush=True)
                total = hits = 0.0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--studio-steps", type=int, default=80)
    p.add_argument("--field-steps", type=int, default=120)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=13)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    tr = Trainer(args)
    tr.phase("studio", args.studio_steps, 250.0, args.lr)
    tr.phase("field ", args.field_steps, 9000.0, args.lr)


if __name__ == "__main__":
    main()
