"""Outputs of which hardly anything is left.

An infinity inside a layer need not come out of it: a sum that overflows makes every share of it
zero, and rsqrt makes zero of an infinite mean. What comes out is finite, and nothing; it may be
fp32, where one op behind the infinity was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.frameworks.tensors import Values

VANISHED = 0.9  # share of zeros from which a look inside is worth a second call
THERE = 0.5  # of what went in, at most so much may be zero
MIN_SIZE = 16
_SAMPLE = 64  # elements that are looked at first: nearly all outputs are known by them


def is_vanished(outputs: Sequence[Values]) -> bool:
    """Whether nearly all elements of all outputs are zero."""
    return bool(outputs) and all(map(_is_nothing, outputs))


def is_there(values: Values) -> bool:
    """Whether enough of ``values`` is not zero for something to be expected of it."""
    return values.size > 0 and _zero_share(values.bits) <= THERE


def _is_nothing(values: Values) -> bool:
    if values.size < MIN_SIZE:
        return False
    sample = values.bits[:: max(1, values.size // _SAMPLE)]
    return _zero_share(sample) >= VANISHED and _zero_share(values.bits) >= VANISHED


def _zero_share(bits: NDArray[Any]) -> float:
    doubled = bits + bits  # of both zeros: the sign bit is shifted out
    return 1.0 - np.count_nonzero(doubled) / bits.size
