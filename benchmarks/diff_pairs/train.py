"""A small transformer with one change of many: what ``benchmarks/diff.py`` compares.

python train.py                 # as A
python train.py --change gelu   # as B
python train.py --noise         # the last bits of one module's output are drawn anew in each run
"""

import argparse
import math
import os

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--change", default="")
parser.add_argument("--noise", action="store_true")
options = parser.parse_args()
change = options.change
WIDTH, HEADS, WORDS, STEPS, BATCH, LENGTH = 32, 4, 40, 8, 16, 12
noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
now = 0


class Linear(nn.Linear):
    how = ""

    def forward(self, x):
        if self.how == "tf32":  # operands with 10 bits of mantissa, sums in fp32
            x, weight = rounded(x), rounded(self.weight)
            return F.linear(x, weight, self.bias)
        if self.how == "split":  # as two ranks of a row-parallel layer and their all-reduce
            half = self.in_features // 2
            first = F.linear(x[..., :half], self.weight[:, :half])
            return first + F.linear(x[..., half:], self.weight[:, half:]) + self.bias
        if self.how == "double":  # another kernel for the same matmul
            return F.linear(x.double(), self.weight.double(), self.bias.double()).float()
        return super().forward(x)


def rounded(x):
    keep = x.detach().view(torch.int32)
    keep = ((keep + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)
    return x + (keep - x.detach())


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.qkv = Linear(WIDTH, 3 * WIDTH)
        self.proj = Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            out = scores.softmax(-1) @ v
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = Attention(change == "attention" or (change == "attention_one" and number == 1))
        self.ln2 = nn.LayerNorm(WIDTH)
        tanh = "tanh" if change == "gelu" and number == 0 else "none"
        self.mlp = nn.Sequential(
            Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate=tanh), Linear(4 * WIDTH, WIDTH)
        )
        self.drop = nn.Dropout(0.1 if change == "dropout" and number == 1 else 0.0)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        inside = self.ln2(x)
        if change == "late" and self.number == 1 and now >= 5:
            inside = inside * 1.001
        return x + self.drop(self.mlp(inside))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(0), Block(1))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.blocks(self.emb(words))
        if options.noise:
            x = x * (1 + 1e-7 * torch.randn(x.shape, generator=noise))
        x = self.norm(x)
        return self.head(x.to(self.head.weight.dtype)).float()


if change == "default_dtype":
    torch.set_default_dtype(torch.bfloat16)
torch.manual_seed(1 if change == "seed" else 0)
net = Net()
torch.set_default_dtype(torch.float32)
if change == "ln_eps":
    net.blocks[1].ln1.eps = 1e-3
if change == "tf32":
    Linear.how = "tf32"
if change == "split":
    net.blocks[0].mlp[2].how = "split"
if change == "kernel":
    net.blocks[1].mlp[0].how = "double"
if change == "init":
    nn.init.xavier_uniform_(net.blocks[1].mlp[0].weight)
if change == "half_head":
    net.head.half()

model = torch.compile(net, backend="aot_eager_decomp_partition") if change == "compile" else net
optimizer = torch.optim.AdamW(
    net.parameters(),
    lr=1e-2,
    eps=1e-4 if change == "eps" else 1e-8,
    betas=(0.8, 0.999) if change == "betas" else (0.9, 0.999),
    fused=True if change == "fused" else None,
)
batches = [
    torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(n))
    for n in range(STEPS)
]
if change == "order":
    batches[2], batches[3] = batches[3], batches[2]
for now, words in enumerate(batches):  # noqa: B007
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        scores = model(words)
    smoothing = 0.05 if change == "smoothing" else 0.0
    loss = F.cross_entropy(
        scores.flatten(0, 1), words.roll(1, 1).flatten(), label_smoothing=smoothing
    )
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.25 if change == "clip" else 0.5)
    optimizer.step()
