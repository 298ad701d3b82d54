"""Put the generators that a loss may draw from back as they were: torch's, NumPy's, Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """What is drawn inside is drawn again outside."""
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
