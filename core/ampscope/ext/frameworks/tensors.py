"""A framework's tensor as NumPy bits with its dtype's name, and its exponents counted.

bf16 has no NumPy dtype of its own: TensorFlow hands out ``ml_dtypes.bfloat16`` and Paddle uint16;
both are the same 16 bits, and the counter reads bits.

    values = Values.of(array)          # float16, float32, float64, or a bfloat16 of ml_dtypes
    values = Values.bf16(bits)         # uint16 bits
    count_into(values, row)            # row: int64, RAW_LEN long

Which GPU a run asks for is read here too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.errors import BadInput
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
class Values:
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

    @classmethod
    def of(cls, array: NDArray[Any], label: str = "") -> Values:
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
    def bf16(cls, bits: NDArray[np.uint16], label: str = "") -> Values:
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


def count_into(values: Values, row: Raw) -> None:
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


# Which GPU a run asks for: the same words, and the same refusal, for every framework.


def wanted_gpu(device: str, count: int, framework: str) -> int | None:
    """Number of the GPU that "cuda" or "cuda:N" means, of ``count`` that ``framework`` sees; None
    for "auto" and "cpu". Raises BadInput for one that is not there."""
    if not device.startswith("cuda"):
        return None
    number = int(device.partition(":")[2] or 0)
    if number >= count:
        gpus = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
        raise BadInput(f"There is no device {device!r}: {framework} here sees {gpus}.")
    return number
