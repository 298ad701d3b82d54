"""Settings of the tagger; one object is handed to everything."""
from dataclasses import dataclass

import torch


@dataclass
class Config:
    vocab: int = 20
    classes: int = 4
    dim: int = 24
    heads: int = 2
    max_len: int = 8
    batch: int = 16
    epochs: int = 3
    steps_per_epoch: int = 20
    lr: float = 6e-3
    clip: float = 1.0
    seed: int = 5
    dtype: torch.dtype = torch.float16
