import math

import torch


class Keywords:
    """Int16 recordings of short tonal 'words'. Field recordings come from a hotter microphone."""

    def __init__(self, n_words=6, length=1600, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.n_words, self.length = n_words, length
        self.tones = 180 + 620 * torch.rand(n_words, 3, generator=self.g)

    def batch(self, n, level):
        word = torch.randint(self.n_words, (n,), generator=self.g)
        t = torch.arange(self.length) / 8000
        seg = (torch.arange(self.length) * 3 // self.length).expand(n, -1)
        jitter = 1 + 0.02 * torch.randn(n, 1, generator=self.g)
        freq = self.tones[word].gather(1, seg) * jitter
        phase = 2 * math.pi * torch.rand(n, 1, generator=self.g)
        gain = level * (0.6 + 0.4 * torch.rand(n, 1, generator=self.g))
        wave = gain * torch.sin(2 * math.pi * freq * t + phase)
        wave = wave + 0.15 * level * torch.randn(n, self.length, generator=self.g)
        return wave.clamp(-32768, 32767).round().to(torch.int16), word
