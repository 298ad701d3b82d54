"""Masked token pretraining with a small mixer."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

MASK = 0


class Mixer(nn.Module):
    def __init__(self, vocab, length, dim):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(length, length)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.tok(ids)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.out(x + self.ff(x))


def mlm_loss(logits, ids, chosen):
    nll = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten(), reduction="none")
    weight = chosen.flatten().float()
    return (nll * weight).sum() / weight.sum()


def main(args):
    torch.manual_seed(args.seed)
    gen = torch.Generator().manual_seed(args.seed + 1)
    model = Mixer(40, 12, 48)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(args.steps):
        start = torch.randint(1, 40, (args.batch, 1), generator=gen)
        ids = (start + torch.arange(12) - 1) % 39 + 1
        chosen = torch.rand(ids.shape, generator=gen) < args.mask_prob
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mlm_loss(model(ids.masked_fill(chosen, MASK)), ids, chosen)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 10 == 0 or not torch.isfinite(loss):
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--mask-prob", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=35)
    main(p.parse_args())
