"""Sequences of tokens with padding; a tag says in which quarter of the vocabulary its token lies,
shifted by one at every other place."""
import torch

PAD = 0


class Tags:
    def __init__(self, cfg, seed):
        self.cfg = cfg
        self.gen = torch.Generator().manual_seed(seed)

    def batch(self, n):
        cfg = self.cfg
        lengths = torch.randint(0, cfg.max_len + 1, (n,), generator=self.gen)
        tokens = torch.randint(1, cfg.vocab, (n, cfg.max_len), generator=self.gen)
        inside = torch.arange(cfg.max_len)[None] < lengths[:, None]
        tokens = torch.where(inside, tokens, PAD)
        tags = (tokens * cfg.classes // cfg.vocab + torch.arange(cfg.max_len) % 2) % cfg.classes
        return tokens, torch.where(inside, tags, -100)
