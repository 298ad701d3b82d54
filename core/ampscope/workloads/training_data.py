"""What the built-in workloads train on: handwritten digits and character text, and their losses."""

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
_FALLBACK = Path(__file__).parent / "data" / "fallback.txt"
_PIXEL_MAX = 16.0
_BATCH_SEED_OFFSET = 1  # batches are drawn from another stream than the weights
# Single-file modules that Python 3.11 to 3.13 all have, in sorted order.
_MODULES = (
    *("argparse", "ast", "calendar", "configparser", "csv", "difflib", "dis", "doctest", "enum"),
    *("fractions", "functools", "heapq", "inspect", "ipaddress", "locale", "mailbox", "pickle"),
    *("random", "shutil", "socket", "statistics", "subprocess", "tarfile", "tempfile", "textwrap"),
    *("threading", "tokenize", "typing", "uuid", "weakref"),
)
# Newline and printable ASCII: 96 symbols. A multiple of 8, as Tensor Cores want for the last layer
# (NVIDIA, "Matrix Multiplication Background User's Guide"); everything else is read as "?".
VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))

DigitBatch = tuple[Tensor, Tensor]  # images (batch, 1, side, side) float32; labels (batch,) int64
TextBatch = tuple[Tensor, Tensor]  # (batch, context) int64: characters, and the ones after them


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


def read_digits() -> DigitBatch:
    """All images, (1797, 1, 8, 8) in [0, 1], and their labels, (1797,).

    The test part of UCI's "Optical Recognition of Handwritten Digits"; source and licence are in
    data/ATTRIBUTION.md. Pixels are from 0 to 16 in the file. The blank border (49 % of all pixels
    is exactly zero) is kept, for zeros that are in the data and not made by half precision belong
    in the picture.
    """
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


@lru_cache(maxsize=1)
def read_text() -> Tensor:
    """The whole text as indices, a (characters,) uint8 tensor: sources of the Python standard
    library on this machine, all modules of the list or none of them.

    It is real text, about 1.7 MB, and comes with Python, so nothing has to be downloaded. The list
    is fixed; the text differs between Python versions, so a loss curve on text is comparable
    between runs on one Python only. Where sources are missing (a frozen or zipped library) a short
    text that ships with the package takes their place, and a warning says so.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        sources = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES]
    except OSError:
        warnings.warn(
            "The sources of the Python standard library were not found: text workloads train on "
            "the short text that ships with ampscope.",
            stacklevel=2,
        )
        return encode(_FALLBACK.read_text(encoding="utf-8"))
    return encode("\n".join(sources))


def encode(text: str) -> Tensor:
    """One uint8 index into VOCABULARY for each character; tabs are read as one space."""
    raw = text.replace("\t", " ").encode("ascii", errors="replace")
    table = np.full(256, VOCABULARY.index("?"), dtype=np.uint8)
    table[np.frombuffer(VOCABULARY.encode("ascii"), dtype=np.uint8)] = np.arange(len(VOCABULARY))
    return torch.from_numpy(table[np.frombuffer(raw, dtype=np.uint8)])


def next_character_loss(model: nn.Module, batch: TextBatch) -> Tensor:
    """Mean cross-entropy over all positions, in nats; ln(96) = 4.56 is that of a guess."""
    characters, targets = batch
    logits: Tensor = model(characters)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
