"""A framework's tensor as NumPy bits with its dtype's name, and its exponents counted.

bf16 has no NumPy dtype of its own: TensorFlow hands out ``ml_dtypes.bfloat16`` and Paddle uint16;
both are the same 16 bits, and the counter reads bits.

    values = TensorBits.of(array)          # float16, float32, float64, or a bfloat16 of ml_dtypes
    values = TensorBits.bf16(bits)         # uint16 bits
    count_into(values, row)            # row: int64, RAW_LEN long

What is read off such values in few passes (norms, maxima, zeros) follows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.numerics.formats import FORMATS
from ampscope.numerics.histogram import (
    ABOVE,
    BELOW,
    FIRST,
    HIGHEST,
    LOWEST,
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    Raw,
)

_COUNTED = ("fp16", "bf16", "fp32")  # by the compiled kernel
_LAYOUTS: dict[np.dtype[Any], tuple[str, type[np.generic]]] = {
    np.dtype(np.float16): ("fp16", np.uint16),
    np.dtype(np.float32): ("fp32", np.uint32),
    np.dtype(np.float64): ("fp64", np.float64),
}
# Bits of the mantissa, and what turns an exponent's bits into a bin of the histogram.
_SHIFTS = {
    name: (fmt.mantissa_bits, FIRST - LOWEST - fmt.bias - fmt.mantissa_bits)
    for name, fmt in FORMATS.items()
    if name in _COUNTED
}
_Job = ctypes.c_int64 * 10


@dataclass(frozen=True, slots=True)
class TensorBits:
    """Flat bits of a tensor. ``label`` is the dtype under which it is recorded: an emulation keeps
    fp16 values in fp32 memory and records them as what they stand for."""

    bits: NDArray[Any]  # uint16 or uint32, or float64 as it is
    dtype: str  # fp16 | bf16 | fp32 | fp64: the layout of the bits
    label: str = ""

    @property
    def name(self) -> str:
        """The dtype that a record shows."""
        return self.label or self.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.bits.size)

    @property
    def nonfinite(self) -> int:
        """How many elements are NaN or infinite."""
        return nonfinite_count(self.floats())

    @classmethod
    def of(cls, array: NDArray[Any], label: str = "") -> TensorBits:
        """Raises TypeError for what is no floating-point array."""
        layout = _LAYOUTS.get(array.dtype)
        if layout is None:
            if array.dtype.name == "bfloat16":
                return cls.bf16(np.ascontiguousarray(array).view(np.uint16), label)
            raise TypeError(f"exponents are counted of floating-point arrays, not of {array.dtype}")
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        return cls(array.reshape(-1).view(layout[1]), layout[0], label)

    @classmethod
    def bf16(cls, bits: NDArray[np.uint16], label: str = "") -> TensorBits:
        """From the 16 bits of each element."""
        return cls(np.ascontiguousarray(bits).reshape(-1), "bf16", label)

    def floats(self) -> NDArray[Any]:
        """The values in fp32 (fp64 stays)."""
        if self.dtype == "fp64":
            return self.bits
        if self.dtype == "fp16":
            return self.bits.view(np.float16).astype(np.float32)
        if self.dtype == "bf16":
            return (self.bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return self.bits.view(np.float32)


def count_into(values: TensorBits, row: Raw) -> None:
    """Add the counts of every element to ``row`` (int64, contiguous, RAW_LEN long)."""
    if not values.size:
        return
    kernel = _kernel() if values.dtype in _COUNTED else None
    if kernel is None:
        _count_slowly(values.floats(), row)
        return
    bits = values.bits
    mantissa_bits, offset = _SHIFTS[values.dtype]
    where, to = (a.__array_interface__["data"][0] for a in (bits, row))
    job = _Job(
        0, 0, where, bits.size, bits.itemsize, mantissa_bits, offset, 1, to, 1,
    )  # fmt: skip
    kernel(ctypes.byref(job))


@cache
def _kernel() -> Callable[..., None] | None:
    """The compiled counter; None where numba is not installed or does not fit NumPy."""
    try:
        from ampscope.capture.exponent_kernel import compile_kernel
    except ImportError:
        return None
    kernel = compile_kernel()
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)
    call.keeps_alive = kernel  # type: ignore[attr-defined]  # the code lives as long as its kernel
    return call


def _count_slowly(values: NDArray[Any], row: Raw) -> None:
    """Adds ``values`` to ``row`` with NumPy alone; frexp of fp64 is exact for every narrower
    format."""
    wide = values.astype(np.float64)
    zero, finite = wide == 0, np.isfinite(wide)
    negative = np.signbit(wide)
    row[POS_ZERO] += int((zero & ~negative).sum())
    row[NEG_ZERO] += int((zero & negative).sum())
    row[NAN] += int(np.isnan(wide).sum())
    row[POS_INF] += int(np.isposinf(wide).sum())
    row[NEG_INF] += int(np.isneginf(wide).sum())
    exponents = np.frexp(wide[finite & ~zero])[1].astype(np.int64) - 1
    inside = (exponents >= LOWEST) & (exponents <= HIGHEST)
    row[BELOW] += int((exponents < LOWEST).sum())
    row[ABOVE] += int((exponents > HIGHEST).sum())
    row[FIRST:ABOVE] += np.bincount(exponents[inside] - LOWEST, minlength=ABOVE - FIRST)


# Squares that sum to no more than this may have lost terms to fp32's subnormals (2^-126, 1.2e-38).
_SMALL_SQUARE = 1e-28
# Entries summed in fp32 before fp64 takes over. Measured: sums of normal numbers are off by 4e-7,
# sums of one number over and over, whose roundings all go one way, by up to 3e-5.
PART = 1 << 16


def square_sum(values: NDArray[Any]) -> float:
    """Sum of the squares of all entries; NaN or Inf where one of them is. Summing in fp32 is
    several times as fast as converting to fp64, which is taken where fp32 cannot hold the
    squares."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        found = sum(_dot(values[at : at + PART]) for at in range(0, values.size, PART))
        if values.dtype == np.float64 or (_SMALL_SQUARE < found < math.inf):
            return found
        wide = values.astype(np.float64)
        return _dot(wide)


def _dot(values: NDArray[Any]) -> float:
    """Not BLAS, whose threads would wait for the framework's own."""
    return float(np.einsum("i,i->", values, values))


def largest(values: NDArray[Any]) -> float:
    """Largest finite magnitude; 0 where there is none."""
    if not values.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        found = max(float(values.max()), -float(values.min()))
    if math.isfinite(found):
        return found
    kept = values[np.isfinite(values)]
    return float(np.abs(kept).max()) if kept.size else 0.0


def nonfinite_count(values: NDArray[Any]) -> int:
    """NaN and infinities. Their sum is not finite either, and one sum is the cheapest look."""
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(float(values.sum())):
            return 0
    return int(values.size - np.count_nonzero(np.isfinite(values)))


VANISHED = 0.9  # share of zeros from which a look inside is worth a second call
THERE = 0.5  # of what went in, at most so much may be zero
MIN_SIZE = 16
_SAMPLE = 64  # elements that are looked at first: nearly all outputs are known by them


def is_vanished(outputs: Sequence[TensorBits]) -> bool:
    """Whether nearly all elements of all outputs are zero: an infinity inside a layer need not come
    out of it. A sum that overflows makes every share of it zero, and rsqrt makes zero of an
    infinite mean. Such outputs may be fp32, where one op behind the infinity was."""
    return bool(outputs) and all(map(_is_nothing, outputs))


def is_there(values: TensorBits) -> bool:
    """Whether enough of ``values`` is not zero for something to be expected of it."""
    return values.size > 0 and _zero_share(values.bits) <= THERE


def _is_nothing(values: TensorBits) -> bool:
    if values.size < MIN_SIZE:
        return False
    sample = values.bits[:: max(1, values.size // _SAMPLE)]
    return _zero_share(sample) >= VANISHED and _zero_share(values.bits) >= VANISHED


def _zero_share(bits: NDArray[Any]) -> float:
    doubled = bits + bits  # of both zeros: the sign bit is shifted out
    return 1.0 - np.count_nonzero(doubled) / bits.size
