"""Token mixer language model on a synthetic periodic corpus."""
import argparse
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab: int = 96
    dim: int = 64
    layers: int = 8
    ctx: int = 16
    norm_gain: float = 9000.0


class RMSNorm(nn.Module):
    def __init__(self, dim, gain=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), float(gain)))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return (h * self.weight).to(x.dtype)


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.pre = RMSNorm(cfg.dim)
        self.mix = nn.Linear(cfg.dim, cfg.dim)
        self.out = nn.Linear(cfg.dim, cfg.dim)
        self.post = RMSNorm(cfg.dim, cfg.norm_gain)

    def forward(self, x):
        h = self.pre(x)
        h = self.mix(h + h.roll(1, dims=1))
        return x + self.post(self.out(F.gelu(h)))


class MixerLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.proj_in = nn.Linear(cfg.dim, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = RMSNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, idx):
        x = self.proj_in(self.embed(idx))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(cfg, n, bs, gen):
    base = torch.arange(cfg.ctx + 1)
    for _ in range(n):
        start = torch.randint(cfg.vocab, (bs, 1), generator=gen)
        stride = torch.randint(1, 5, (bs, 1), generator=gen)
        seq = (start + stride * base) % cfg.vocab
        yield seq[:, :-1], seq[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.manual_seed(11)
    gen = torch.Generator().manual_seed(5)
    cfg = Config()
    model = MixerLM(cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for step, (x, y) in enumerate(batches(cfg, args.steps, 16, gen)):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}  scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
