"""Handwritten digits: 1,797 images of 8x8 pixels from 0 to 16, in a 45 kB file (data/digits.npz).

The test part of UCI's "Optical Recognition of Handwritten Digits"; source and licence are in
data/ATTRIBUTION.md. Pixels become floats in [0, 1]; the blank border (49 % of all pixels is exactly
zero) is kept, for zeros that are in the data and not made by half precision belong in the picture.

Also here: character text for language models.
"""

from __future__ import annotations

import sysconfig
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
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


# Character text for language models: sources of the Python standard library on this machine.
#
# It is real text, about 1.7 MB, and comes with Python, so nothing has to be downloaded. The list
# of modules is fixed; their text differs between Python versions, so a loss curve on text is
# comparable between runs on one Python only. Where the sources are missing (a frozen or zipped
# library) a short text that ships with the package takes their place, and a warning says so.


# Single-file modules that Python 3.11 to 3.13 all have, in sorted order.
_MODULES = (
    *("argparse", "ast", "calendar", "configparser", "csv", "difflib", "dis", "doctest", "enum"),
    *("fractions", "functools", "heapq", "inspect", "ipaddress", "locale", "mailbox", "pickle"),
    *("random", "shutil", "socket", "statistics", "subprocess", "tarfile", "tempfile", "textwrap"),
    *("threading", "tokenize", "typing", "uuid", "weakref"),
)
_FALLBACK = Path(__file__).parent / "data" / "fallback.txt"

# Newline and printable ASCII: 96 symbols. A multiple of 8, as Tensor Cores want for the last layer
# (NVIDIA, "Matrix Multiplication Background User's Guide"); everything else is read as "?".
VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))

TextBatch = tuple[Tensor, Tensor]  # (batch, context) int64: characters, and the ones after them


def encode(text: str) -> Tensor:
    """One uint8 index into VOCABULARY for each character; tabs are read as one space."""
    raw = text.replace("\t", " ").encode("ascii", errors="replace")
    table = np.full(256, VOCABULARY.index("?"), dtype=np.uint8)
    table[np.frombuffer(VOCABULARY.encode("ascii"), dtype=np.uint8)] = np.arange(len(VOCABULARY))
    return torch.from_numpy(table[np.frombuffer(raw, dtype=np.uint8)])


@lru_cache(maxsize=1)
def read_text() -> Tensor:
    """The whole text as indices, a (characters,) uint8 tensor."""
    return encode(_standard_library_text() or _fallback_text())


def next_character_loss(model: nn.Module, batch: TextBatch) -> Tensor:
    """Mean cross-entropy over all positions, in nats; ln(96) = 4.56 is that of a guess."""
    characters, targets = batch
    logits: Tensor = model(characters)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_batches(seed: int, batch_size: int, context: int) -> Callable[[], Iterator[TextBatch]]:
    """A function that starts the same endless sequence of random windows each time it is called."""
    text = read_text()
    offsets = torch.arange(context + 1)

    def start() -> Iterator[TextBatch]:
        generator = torch.Generator().manual_seed(seed + _BATCH_SEED_OFFSET)
        while True:
            first = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
            window = text[first + offsets].long()
            yield window[:, :-1], window[:, 1:]

    return start


def _standard_library_text() -> str:
    """All modules of the list, or nothing: a part of them would be a third kind of text."""
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        sources = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES]
    except OSError:
        return ""
    return "\n".join(sources)


def _fallback_text() -> str:
    warnings.warn(
        "The sources of the Python standard library were not found: text workloads train on the "
        "short text that ships with ampscope.",
        stacklevel=2,
    )
    return _FALLBACK.read_text(encoding="utf-8")
