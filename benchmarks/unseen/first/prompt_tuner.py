"""Small causal decoder fine-tuned on left padded prompts."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

PAD, VOCAB = 0, 50


class Prompts(Dataset):
    def __init__(self, n=640, seed=9):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(5, 15, (1,), generator=g))
            a = int(torch.randint(1, VOCAB, (1,), generator=g))
            d = int(torch.randint(1, 4, (1,), generator=g))
            self.items.append([(a + i * d - 1) % (VOCAB - 1) + 1 for i in range(length)])

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(r)) + r for r in rows])
    return ids, (ids != PAD).float()


def expand_mask(attention_mask, dtype):
    b, t = attention_mask.shape
    causal = torch.tril(torch.ones(t, t))
    allowed = causal[None] * attention_mask[:, None, :]
    return ((1.0 - allowed) * -1e9).to(dtype)[:, None]


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attention_mask):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q = q / math.sqrt(q.shape[-1])
        weights = q @ k.transpose(-1, -2)
        weights = weights + expand_mask(attention_mask, weights.dtype)
        weights = F.softmax(weights, dim=-1)
        return self.proj((weights.to(v.dtype) @ v).transpose(1, 2).reshape(b, t, c))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, m):
        x = x + self.attn(self.ln1(x), m)
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self, dim=48, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.pos = nn.Embedding(32, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, ids, mask):
        pos = (mask.cumsum(-1) - 1).clamp(min=0).long()
        x = self.tok(ids) + self.pos(pos)
        for layer in self.layers:
            x = layer(x, mask)
        return F.linear(self.ln_f(x), self.tok.weight)


def main():
    torch.manual_seed(4)
    loader = DataLoader(Prompts(), batch_size=16, shuffle=True, collate_fn=collate)
    model = Decoder()
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=2 * len(loader))
    for epoch in range(2):
        for ids, mask in loader:
            optim.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(ids, mask)
                loss = F.cross_entropy(
                    logits[:, :-1].reshape(-1, VOCAB).float(), ids[:, 1:].reshape(-1), ignore_index=PAD
                )
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            sched.step()
        print(f"epoch {epoch} loss {loss.item():.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
