"""Handwritten digits: 1,797 images of 8x8 pixels from 0 to 16, in a 45 kB file (data/digits.npz).

The test part of UCI's "Optical Recognition of Handwritten Digits"; source and licence are in
data/ATTRIBUTION.md. Pixels become floats in [0, 1]; the blank border (49 % of all pixels is exactly
zero) is kept, for zeros that are in the data and not made by half precision belong in the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FILE = Path(__file__).parent / "data" / "digits.npz"
_PIXEL_MAX = 16.0
_BATCH_SEED_OFFSET = 1  # batches are drawn from another stream than the weights

DigitBatch = tuple[Tensor, Tensor]  # images (batch, 1, side, side) float32; labels (batch,) int64


def read_digits() -> DigitBatch:
    """All images, (1797, 1, 8, 8) in [0, 1], and their labels, (1797,)."""
    with np.load(_FILE, allow_pickle=False) as data:
        images = torch.from_numpy(data["images"].astype(np.float32) / _PIXEL_MAX)
        labels = torch.from_numpy(data["labels"].astype(np.int64))
    return images[:, None], labels


def enlarge(images: Tensor) -> Tensor:
    """(n, 1, 8, 8) -> (n, 1, 28, 28), LeNet's input: each pixel 3x3 times, then a border.

    28 = 3 * 8 + 2 * 2, so the classic layer sizes fit with no change and no pixel is interpolated.
    """
    tripled = images.repeat_interleave(3, dim=2).repeat_interleave(3, dim=3)
    return F.pad(tripled, (2, 2, 2, 2))


def classification_loss(model: nn.Module, batch: DigitBatch) -> Tensor:
    """Mean cross-entropy of the logits; runs in fp32 under autocast."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def digit_batches(
    seed: int, batch_size: int, prepare: Callable[[Tensor], Tensor] | None = None
) -> Callable[[], Iterator[DigitBatch]]:
    """A function that starts the same endless sequence of batches each time it is called.

    Every epoch is a new permutation of the images; its last, incomplete batch is left out.
    """
    images, labels = read_digits()
    if prepare is not None:
        images = prepare(images)

    def start() -> Iterator[DigitBatch]:
        generator = torch.Generator().manual_seed(seed + _BATCH_SEED_OFFSET)
        while True:
            order = torch.randperm(len(labels), generator=generator)
            for first in range(0, len(labels) - batch_size + 1, batch_size):
                chosen = order[first : first + batch_size]
                yield images[chosen], labels[chosen]

    return start
