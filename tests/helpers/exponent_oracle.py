"""The exponent histogram the slow way: a loop over `math.frexp`, and formats decoded by hand.

Nothing here uses torch or the code under test; the layout of a row is spelled out again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ROW_LENGTH = 284
SPECIALS = {"+0": 279, "-0": 280, "nan": 281, "+inf": 282, "-inf": 283}


def bin_of(value: float) -> int:
    """Index in a row of one number, given exactly as a Python float."""
    if math.isnan(value):
        return SPECIALS["nan"]
    sign = "-" if math.copysign(1.0, value) < 0 else "+"
    if math.isinf(value):
        return SPECIALS[sign + "inf"]
    if value == 0:
        return SPECIALS[sign + "0"]
    exponent = math.frexp(value)[1] - 1  # frexp's fraction lies in [0.5, 1)
    if exponent < -149:
        return 0
    return 278 if exponent > 127 else 1 + exponent + 149


def row_of(values: Iterable[float]) -> NDArray[np.int64]:
    row = np.zeros(ROW_LENGTH, np.int64)
    for value in values:
        row[bin_of(value)] += 1
    return row


def fp16(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits))[0])


def fp32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bf16(bits: int) -> float:
    return fp32(bits << 16)


def fp64(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def fp8(bits: int, exponent_bits: int, bias: int, nans: Iterable[int], infinite: bool) -> float:
    """An 8-bit number with a sign; ``nans`` are the patterns that are NaN, sign included."""
    if bits in nans:
        return math.nan
    mantissa_bits = 7 - exponent_bits
    field = (bits >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (bits & (2**mantissa_bits - 1)) / 2**mantissa_bits
    sign = -1.0 if bits & 0x80 else 1.0
    if infinite and field == 2**exponent_bits - 1:
        return sign * math.inf
    if field == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (field - bias)


def e5m2(bits: int) -> float:
    return fp8(bits, 5, 15, {s | m for s in (0x7C, 0xFC) for m in (1, 2, 3)}, infinite=True)


def e4m3fn(bits: int) -> float:
    return fp8(bits, 4, 7, {0x7F, 0xFF}, infinite=False)


def e5m2fnuz(bits: int) -> float:
    return fp8(bits, 5, 16, {0x80}, infinite=False)


def e4m3fnuz(bits: int) -> float:
    return fp8(bits, 4, 8, {0x80}, infinite=False)


def e8m0fnu(bits: int) -> float:
    """A power of two without sign, mantissa or zero (OCP Microscaling formats, section 5.4.1)."""
    return math.nan if bits == 0xFF else 2.0 ** (bits - 127)
