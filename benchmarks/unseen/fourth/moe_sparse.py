"""Sequence tagging with a top-1 mixture of experts and a hashed embedding table, fp16 autocast."""
import argparse

import torch
from torch import nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class TopOne(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([Expert(width) for _ in range(experts)])
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x):
        logits = self.router(x).float()
        gate = torch.softmax(logits, -1)
        top, which = gate.max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = which == e
            if rows.any():
                out[rows] = (expert(x[rows]) * top[rows].unsqueeze(-1)).to(out.dtype)
        if self.training:
            self.load += torch.bincount(which, minlength=len(self.experts)).float()
        share = F.one_hot(which, len(self.experts)).float().mean(0)
        return x + out, len(self.experts) * (share * gate.mean(0)).sum()


class Tagger(nn.Module):
    def __init__(self, vocab, tags, width=32, experts=8):
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.moe = TopOne(width, experts)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tags)

    def forward(self, ids, lengths):
        pad = torch.arange(ids.shape[1])[None] >= lengths[:, None]
        h = self.table(ids)
        h = h + torch.relu(self.mix(h.transpose(1, 2))).transpose(1, 2)
        flat, aux = self.moe(h[~pad])
        logits = self.head(self.norm(flat))
        full = logits.new_full((*ids.shape, logits.shape[-1]), float("-inf"))
        full[~pad] = logits
        return full, pad, aux


class Corpus:
    def __init__(self, vocab=2000, used=160, tags=5, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.vocab, self.used, self.tags = vocab, used, tags
        self.role = torch.randint(tags, (vocab,), generator=self.g)

    def batch(self, n, length=16):
        ids = torch.randint(self.used, (n, length), generator=self.g)
        sizes = torch.randint(3, length + 1, (n,), generator=self.g)
        tag = (self.role[ids] + self.role[ids.roll(1, 1)] // 3) % self.tags
        tag[:, 0] = self.role[ids[:, 0]]
        return ids, sizes, tag


class Trainer:
    def __init__(self, args):
        self.args = args
        self.data = Corpus(seed=args.seed)
        self.model = Tagger(self.data.vocab, self.data.tags)
        table = list(self.model.table.parameters())
        rest = [p for n, p in self.model.named_parameters() if not n.startswith("table")]
        self.opts = [torch.optim.Adagrad(table, lr=0.1), torch.optim.AdamW(rest, lr=args.lr)]
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.fp16, init_scale=2.0 ** 32, growth_interval=100)
        self.skipped = 0

    def loss(self, ids, sizes, tag):
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16):
            scores, pad, aux = self.model(ids, sizes)
        target = tag.masked_fill(pad, -100)
        scores = torch.where(pad[..., None], torch.zeros_like(scores), scores)
        ce = F.cross_entropy(scores.float().flatten(0, 1), target.flatten())
        hit = ((scores.argmax(-1) == tag) & ~pad).sum() / (~pad).sum()
        return ce + self.args.aux * aux.float(), hit

    def step(self):
        loss, hit = self.loss(*self.data.batch(self.args.batch))
        for o in self.opts:
            o.zero_grad(set_to_none=False)
        self.scaler.scale(loss).backward()
        for o in self.opts:
            self.scaler.unscale_(o)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        if not torch.isfinite(norm):
            self.skipped += 1
        for o in self.opts:
            self.scaler.step(o)
        self.scaler.update()
        return loss.item(), hit.item()

    def fit(self):
        a = b = 0.0
        for i in range(self.args.steps):
            loss, hit = self.step()
            a, b = a + loss, b + hit
            if (i + 1) % 20 == 0:
                scale = self.scaler.get_scale() if self.args.fp16 else 1.0
                print(f"step {i + 1:4d}  loss {a / 20:.4f}  accuracy {b / 20:.3f}  scale {scale:g}"
                      f"  skipped {self.skipped}", flush=True)
                a = b = 0.0


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=240)
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--aux", type=float, default=0.01)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=31)
    a = p.parse_args()
    torch.manual_seed(a.seed)
    torch.set_num_threads(1)
    Trainer(a).fit()
