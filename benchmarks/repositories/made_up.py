"""Data that the repositories train on here, made from a fixed seed: pictures, masks, tokens, text.

Each function writes below ``folder`` and is named by a recipe's ``data``.
"""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np

SEED = 7
WORDS = ("the", "a", "small", "red", "old", "cat", "dog", "bird", "runs", "sees", "under", "and")


def tokens(folder: Path, count: int = 20_000, vocabulary: int = 64) -> None:
    """``train.bin``, ``val.bin`` (uint16), ``meta.pkl``: a noisy cycle through the vocabulary."""
    rng = np.random.default_rng(SEED)
    steps = rng.integers(1, 4, count)
    stream = (np.cumsum(steps) % vocabulary).astype(np.uint16)
    stream.tofile(folder / "train.bin")
    stream[: count // 4].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))


def sentences(count: int) -> list[str]:
    """Sentences of 12 words."""
    rng = random.Random(SEED)
    return [" ".join(rng.choices(WORDS, k=12)) + "." for _ in range(count)]


def text(folder: Path, name: str = "input.txt", count: int = 400) -> None:
    """One file with a sentence a line."""
    (folder / name).write_text("\n".join(sentences(count)) + "\n")


def json_lines(folder: Path, name: str = "text.jsonl", count: int = 120) -> None:
    """One file with ``{"text": …}`` a line."""
    lines = (json.dumps({"text": sentence}) for sentence in sentences(count))
    (folder / name).write_text("\n".join(lines) + "\n")


def _picture(rng: np.random.Generator, size: int, label: int) -> tuple[Any, Any]:
    """A coloured disc on a noisy ground, and where it is."""
    y, x = np.mgrid[:size, :size]
    at = rng.integers(size // 4, 3 * size // 4, 2)
    disc = (x - at[0]) ** 2 + (y - at[1]) ** 2 < (size // 5) ** 2
    picture = rng.integers(0, 90, (size, size, 3)).astype(np.uint8)
    picture[disc] = np.array([60 + 50 * (label % 4), 220 - 50 * (label % 3), 128], np.uint8)
    return picture, disc.astype(np.uint8)


def pictures(folder: Path, count: int = 32, size: int = 32, classes: int = 0) -> None:
    """PNG files, in a folder for each class where there are classes."""
    from PIL import Image

    rng = np.random.default_rng(SEED)
    for number in range(count):
        label = number % max(classes, 1)
        place = folder / f"class{label}" if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_picture(rng, size, number)[0]).save(place / f"{number:04}.png")


def masked_pictures(folder: Path, count: int = 20, size: int = 48) -> None:
    """``imgs`` and ``masks`` with the same names."""
    from PIL import Image

    rng = np.random.default_rng(SEED)
    for kind in ("imgs", "masks"):
        (folder / kind).mkdir(exist_ok=True)
    for number in range(count):
        picture, mask = _picture(rng, size, number)
        Image.fromarray(picture).save(folder / "imgs" / f"{number:04}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number:04}.png")


KINDS = {f.__name__: f for f in (tokens, text, json_lines, pictures, masked_pictures)}
