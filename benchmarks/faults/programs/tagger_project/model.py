"""A transformer encoder with one block and a head for each token."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from data import PAD


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, padded):
        b, t, d = x.shape
        q = self.to_q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k = self.to_k(x).view(b, t, self.heads, -1).transpose(1, 2)
        v = self.to_v(x).view(b, t, self.heads, -1).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        scores = scores.masked_fill(padded[:, None, None, :], -1e4)
        mixed = torch.matmul(scores.softmax(dim=-1), v)
        return self.proj(mixed.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x, padded):
        x = x + self.attn(self.norm1(x), padded)
        h = F.gelu(self.up(self.norm2(x)))
        return x + self.down(h)


class Tagger(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.places = nn.Parameter(0.02 * torch.randn(cfg.max_len, cfg.dim))
        self.block = Block(cfg.dim, cfg.heads)
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, ids):
        x = self.tokens(ids) + self.places
        x = self.block(x, ids == PAD)
        return self.head(self.norm(x))


def tag_loss(logits, tags):
    each = F.cross_entropy(logits.flatten(0, 1).float(), tags.flatten().clamp(min=0), reduction="none")
    used = (tags.flatten() >= 0).float()
    return (each * used).sum() / used.sum().clamp(min=1)
