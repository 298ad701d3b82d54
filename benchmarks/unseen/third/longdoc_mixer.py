"""Document tagger: trained on short snippets, validated on whole documents."""
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=90)
p.add_argument("--dim", type=int, default=48)
p.add_argument("--heads", type=int, default=3)
p.add_argument("--train-len", type=int, default=64)
p.add_argument("--eval-len", type=int, default=4096)
p.add_argument("--lr", type=float, default=2e-3)
args = p.parse_args([])
torch.manual_seed(3)
VOCAB, CLASSES = 200, 5


class KernelMixer(nn.Module):
    """O(T) token mixing with a positive feature map."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        ctx = k.transpose(-1, -2) @ v
        ones = torch.ones(b, self.h, t, 1, device=x.device, dtype=k.dtype)
        z = q @ (k.transpose(-1, -2) @ ones)
        y = (q @ ctx) / z
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mix = KernelMixer(d, h)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.mix(self.n1(x))
        return x + self.ff(self.n2(x))


class Tagger(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.layers = nn.ModuleList(Block(d, h) for _ in range(2))
        self.out = nn.Linear(d, CLASSES)

    def forward(self, ids):
        x = self.emb(ids)
        for l in self.layers:
            x = l(x)
        return self.out(x.mean(1))


topic_words = torch.randint(0, VOCAB, (CLASSES, 30))


def docs(n, length):
    y = torch.randint(0, CLASSES, (n,))
    noise = torch.randint(0, VOCAB, (n, length))
    topical = topic_words[y][torch.arange(n)[:, None], torch.randint(0, 30, (n, length))]
    return torch.where(torch.rand(n, length) < 0.35, topical, noise), y


model = Tagger(args.dim, args.heads)
opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)


@torch.no_grad()
def validate():
    model.eval()
    tot, hit, n = 0.0, 0, 0
    for _ in range(2):
        x, y = docs(4, args.eval_len)
        with torch.autocast("cpu", dtype=torch.float16):
            o = model(x)
        tot += F.cross_entropy(o.float(), y, reduction="sum").item()
        hit += (o.argmax(-1) == y).sum().item()
        n += len(y)
    model.train()
    return tot / n, hit / n


for step in range(1, args.steps + 1):
    x, y = docs(32, args.train_len)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 30 == 0:
        vl, va = validate()
        print(f"step {step} train {loss.item():.4f} val {vl:.4f} acc {va:.2f}")
