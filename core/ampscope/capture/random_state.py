"""Put the generators that a loss may draw from back as they were: torch's, NumPy's, Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn


def remembered(model: nn.Module) -> Callable[[], None]:
    """The generators' states of this moment: what is returned puts them back, once or again."""
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for device, state in cuda:
            torch.cuda.set_rng_state(state, device)

    return put_back


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
