"""Sequences of steps that overflow or not, for scalers that are compared step by step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

Sequence = Callable[[random.Random], Iterator[bool]]


def rarely(chance: random.Random) -> Iterator[bool]:
    while True:
        yield chance.random() < 0.02


def evenly(chance: random.Random) -> Iterator[bool]:
    while True:
        yield chance.random() < 0.5


def in_bursts(chance: random.Random) -> Iterator[bool]:
    while True:
        yield from [True] * chance.randint(1, 9)
        yield from [False] * chance.randint(1, 40)


def just_before_growth(chance: random.Random) -> Iterator[bool]:
    """The counter is one short of the interval when Inf comes."""
    while True:
        yield from [False] * 6
        yield True


def never(chance: random.Random) -> Iterator[bool]:
    yield from itertools.repeat(False)


def always(chance: random.Random) -> Iterator[bool]:
    yield from itertools.repeat(True)


SEQUENCES = (rarely, evenly, in_bursts, just_before_growth, never, always)
