"""What the numbers of a saved tensor are, from their raw bits: compiled by numba, without the GIL.

One pass counts NaN, infinities, zeros, subnormals, negative numbers, and what fp16 would make of
them; two more kernels compare two tensors (an average of weights with the weights; the two moments
of Adam). Magnitudes of floating-point numbers are ordered as their bits are, so everything is a
comparison of integers, which a compiler turns into vectors.

All compiled code is in this file: numba's cache notices its change.
"""

# numba compiles these functions from their source, with C's integers: Python's types do not apply.
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from ampscope.numerics.formats import FORMATS, NumberFormat

# What one pass finds, in this order.
(NAN, POS_INF, NEG_INF, ZERO, SUBNORMAL, NEGATIVE, FP16_INF, FP16_ZERO, FP16_SUBNORMAL, LARGEST) = (
    range(10)
)
LENGTH = 10
# Magnitudes between which a conversion to fp16, to nearest with ties to even, changes its kind.
FP16_OVERFLOWS = 65520.0  # a tie between 65504 and 2^16, which goes to the even one: infinity
FP16_VANISHES = 2.0**-25  # a tie between 0 and the smallest subnormal, which goes to zero
FP16_NORMAL = 2.0**-14 - 2.0**-25  # a tie below the smallest normal number goes up to it
BLOCK = 1 << 14  # elements: counters of 32 bits fill vectors twice as wide as those of 64

# The formats of checkpoints by safetensors' names, with NumPy's unsigned integers of that width.
FLOATS: dict[str, tuple[NumberFormat, type[np.unsignedinteger[Any]]]] = {
    "F64": (FORMATS["fp64"], np.uint64),
    "F32": (FORMATS["fp32"], np.uint32),
    "BF16": (FORMATS["bf16"], np.uint16),
    "F16": (FORMATS["fp16"], np.uint16),
    "F8_E4M3": (FORMATS["e4m3"], np.uint8),
    "F8_E5M2": (FORMATS["e5m2"], np.uint8),
}

# Complex numbers are two numbers of these formats.
PARTS = {"C32": "F16", "C64": "F32", "C128": "F64"}
# Formats without NaN and infinity.
FINITE = {
    "BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F4", "F6_E2M3", "F6_E3M2",
}  # fmt: skip
LOOKED_AT = frozenset({*FLOATS, *PARTS, *FINITE})


def bits_of(dtype: str) -> NDArray[np.uint64]:
    """What :func:`count` needs of a format: its sign bit, first normal number, infinity, first NaN
    (the same in a format without infinity); the first magnitudes that fp16 makes infinite, does not
    make zero, makes normal; all bits but the sign, minus infinity, zero."""
    fmt, kind = FLOATS[dtype]
    width = 8 * np.dtype(kind).itemsize
    sign, mantissa = 1 << (width - 1), fmt.mantissa_bits
    top = ((1 << fmt.exponent_bits) - 1) << mantissa
    infinity = top if fmt.has_infinity else sign  # e4m3 has none
    first_nan = top + 1 if fmt.has_infinity else sign - 1
    limits = [_first(fmt, value, above=above) for value, above in (
        (FP16_OVERFLOWS, False), (FP16_VANISHES, True), (FP16_NORMAL, False),
    )]  # fmt: skip
    if not fmt.has_infinity:
        infinity = first_nan
    rest = [sign - 1, sign | infinity, 0]
    return np.array([sign, 1 << mantissa, infinity, first_nan, *limits, *rest], np.uint64)


def _first(fmt: NumberFormat, value: float, *, above: bool) -> int:
    """The bits of the first magnitude of the format that is ``value`` or larger, or, with
    ``above``, larger. The bits of what is not finite where it has none."""
    top = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    if value > fmt.max:
        return top if fmt.has_infinity else top + (1 << fmt.mantissa_bits) - 1
    if value < fmt.min_normal:
        field, rest = 0, value / fmt.min_subnormal
    else:
        exponent = int(np.floor(np.log2(value)))
        field = (exponent + fmt.bias) << fmt.mantissa_bits
        rest = (value / 2.0**exponent - 1.0) * 2.0**fmt.mantissa_bits
    whole = int(rest)
    return field + whole + (1 if above or rest > whole else 0)


def count(bits: NDArray[Any], limits: NDArray[np.uint64], found: NDArray[np.uint64]) -> None:
    """Add what ``bits`` [n] (of unsigned integers) are to ``found`` [LENGTH]."""
    part = np.zeros(LENGTH, np.uint64)
    _kernel(_count)(bits, limits.astype(bits.dtype), part)
    if limits[2] == limits[3]:  # the format has no infinity: what was counted as one is NaN
        part[NEGATIVE] -= part[NEG_INF]
        part[[POS_INF, NEG_INF, FP16_INF]] = 0
    found[:LARGEST] += part[:LARGEST]
    found[LARGEST] = max(found[LARGEST], part[LARGEST])


def overflowing_rows(bits: NDArray[Any], limits: NDArray[np.uint64]) -> int:
    """How many rows of ``bits`` [rows, n] hold a finite number that fp16 makes infinite."""
    magnitudes = bits & (bits.dtype.type(limits[0]) - bits.dtype.type(1))
    infinity = min(int(limits[2]), int(limits[3]))
    overflows = (magnitudes >= limits[4]) & (magnitudes < infinity)
    return int(overflows.any(axis=1).sum())


def distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of two tensors [n]: the sum of squares of their difference and of the second one, over pairs
    that are finite in both, and how many numbers are equal."""
    found = np.zeros(3)
    _kernel(_distance)(one, other, found)
    return found


def moments(
    first: NDArray[np.float32], second: NDArray[np.float32], epsilon: float
) -> tuple[int, int]:
    """Of Adam's moments [n]: in how many places the second is zero and the first is not, and in how
    many of these the first is larger than ``epsilon``."""
    found = np.zeros(2, np.int64)
    _kernel(_moments)(first, second, np.float32(epsilon), found)
    return int(found[0]), int(found[1])


def as_fp32(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The numbers that ``bits`` stand for, in fp32 (F64 is rounded)."""
    if dtype == "F32":
        return bits.view(np.float32)
    if dtype == "F16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F64":
        with np.errstate(over="ignore"):
            return bits.view(np.float64).astype(np.float32)
    return _decoded(dtype)[bits]


def _decoded(dtype: str) -> NDArray[np.float32]:
    from ampscope.numerics.rounding import decode

    return np.array([decode(code, FLOATS[dtype][0]) for code in range(256)], np.float32)


_compiled: dict[str, Callable[..., None]] = {}


def _kernel(function: Callable[..., None]) -> Callable[..., None]:
    name = function.__name__
    if name not in _compiled:
        try:
            _compiled[name] = numba.njit(nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # numba: "no locator available"; a full disk
            _compiled[name] = numba.njit(nogil=True)(function)
    return _compiled[name]


def _count(bits: Any, limits: Any, found: Any) -> None:
    sign, normal, infinity, first_nan = limits[0], limits[1], limits[2], limits[3]
    overflows, vanishes, fp16_normal = limits[4], limits[5], limits[6]
    below_sign, negative_infinity = limits[7], limits[8]
    top = min(infinity, first_nan)
    for start in range(0, bits.size, BLOCK):
        part = bits[start : start + BLOCK]
        # Without the conversions numba would make each of these counters 64 bits wide.
        nan = positive = below = zero = subnormal = np.uint32(0)
        negative = over = gone = small = np.uint32(0)
        largest = limits[9]
        for i in range(part.size):
            b = part[i]
            a = b & below_sign
            nan = np.uint32(nan + np.uint32(a >= first_nan))
            zero = np.uint32(zero + np.uint32(a == 0))
            subnormal = np.uint32(subnormal + np.uint32(a < normal))
            negative = np.uint32(negative + np.uint32(b > negative_infinity))
            below = np.uint32(below + np.uint32(b > sign))
            positive = np.uint32(positive + np.uint32(b == infinity))
            over = np.uint32(over + np.uint32(a >= overflows))
            gone = np.uint32(gone + np.uint32(a < vanishes))
            small = np.uint32(small + np.uint32(a < fp16_normal))
        for i in range(part.size):
            a = part[i] & below_sign
            if a < top and a > largest:
                largest = a
        minus = np.uint32(0)
        if nan or positive or negative:
            for i in range(part.size):
                minus += part[i] == negative_infinity
        found[0] += nan
        found[1] += positive
        found[2] += minus
        found[3] += zero
        found[4] += subnormal - zero
        found[5] += below - negative
        found[6] += over - nan - positive - minus
        found[7] += gone - zero
        found[8] += small - gone
        found[9] = max(found[9], np.uint64(largest))


def _distance(one: Any, other: Any, found: Any) -> None:
    difference = size = 0.0
    equal = 0
    for i in range(one.size):
        a, b = np.float64(one[i]), np.float64(other[i])
        equal += a == b
        d = a - b
        if np.isfinite(d):
            difference += d * d
            size += b * b
    found[0] += difference
    found[1] += size
    found[2] += equal


def _moments(first: Any, second: Any, epsilon: Any, found: Any) -> None:
    zero = large = 0
    for i in range(first.size):
        is_zero = second[i] == 0.0
        zero += is_zero and first[i] != 0.0
        large += is_zero and abs(first[i]) > epsilon
    found[0] += zero
    found[1] += large
