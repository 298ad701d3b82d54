"""Character-level language model: one causal attention block on a repeating text."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

torch.manual_seed(1337)
device = "cuda" if torch.cuda.is_available() else "cpu"
block_size, batch_size, n_embd, n_head = 16, 16, 32, 2

text = "the quick brown fox jumps over the lazy dog. " * 40
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        future = torch.triu(torch.ones(block_size, block_size, dtype=torch.bool), diagonal=1)
        self.register_buffer("future", future)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, n_head, c // n_head).transpose(1, 2)
            for part in self.qkv(x).split(n_embd, dim=2)
        )
        scores = (q / math.sqrt(k.size(-1))) @ k.transpose(-2, -1)
        scores = scores.masked_fill(self.future[:t, :t], -1e9)
        out = F.softmax(scores, dim=-1) @ v
        return self.proj(out.transpose(1, 2).reshape(b, t, c))


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(len(chars), n_embd)
        self.pos = nn.Embedding(block_size, n_embd)
        self.ln = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.lm_head = nn.Linear(n_embd, len(chars))

    def forward(self, idx):
        h = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        return self.lm_head(h + self.attn(self.ln(h)))


def get_batch():
    start = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in start])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in start])
    return x.to(device), y.to(device)


model = CharModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device)

for it in range(40):
    xb, yb = get_batch()
    with torch.autocast(device, dtype=torch.float16):
        logits = model(xb)
        loss = F.cross_entropy(logits.flatten(0, 1), yb.flatten())
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if it % 10 == 0:
        print(f"iter {it}: loss {loss.item():.3f}")
