"""Where the elements of a tensor lie, and how their bits are laid out: the ground of every counter.

A counter wants flat, contiguous memory; training hands out Parameters, channels_last activations,
transposed weights, expanded gradients, slices of a fused projection, sparse gradients. `pieces`
turns any of them into flat tensors, each with the number of times that its elements occur::

    channels_last activation [64, 3, 8, 8]   ->  12,288 elements, once each; no copy
    torch.ones(10).expand(32, 10)            ->  10 elements, 32 times each; no copy
    fused[:, 256:512]                        ->  copies of bounded size

The order of the elements is lost, which a histogram does not miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ampscope.capture.tensors import numbers
from ampscope.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, NumberFormat
from ampscope.numerics.histogram import FIRST, LOWEST

# A strided slice has to be copied; 2^22 elements bound the extra memory at 16 MiB of fp32 and make
# the cost of a step of the loop (about 10 us) invisible.
COPY_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class BitLayout:
    """A number format as a counter of bits sees it.

    ``infinity`` is the magnitude pattern of infinity, or -1 in a format that has none; every
    magnitude above ``largest`` (the last pattern that is not a NaN) is a NaN.
    """

    width: int
    mantissa: int
    bias: int
    infinity: int
    largest: int

    @property
    def rank_offset(self) -> int:
        """Row index less *rank*, where rank 1 … ``mantissa`` are the powers of two of the
        subnormals and ``mantissa`` + e those of the normal numbers with the exponent field e."""
        return FIRST - LOWEST - self.bias - self.mantissa


def _layout(fmt: NumberFormat) -> BitLayout:
    width, mantissa = 1 + fmt.exponent_bits + fmt.mantissa_bits, fmt.mantissa_bits
    infinity = ((1 << fmt.exponent_bits) - 1) << mantissa
    if fmt.has_infinity:
        return BitLayout(width, mantissa, fmt.bias, infinity, infinity)
    return BitLayout(width, mantissa, fmt.bias, -1, (1 << (width - 1)) - 2)


LAYOUTS: dict[torch.dtype, BitLayout] = {
    torch.float16: _layout(FP16),
    torch.bfloat16: _layout(BF16),
    torch.float32: _layout(FP32),
    torch.float8_e4m3fn: _layout(E4M3),
    torch.float8_e5m2: _layout(E5M2),
}


def pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Flat contiguous tensors that together hold the elements, each with its multiplicity.

    Complex numbers count as their two parts, a sparse tensor as its values after the sum over
    repeated indices, a nested one as its values.

    Raises:
        TypeError: integers and booleans; Unreadable, a TypeError, where `ampscope.capture.tensors`
            finds no numbers (meta, fake, quantized, a wrapper of another kind).
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"exponents are counted of floating-point tensors, not of {tensor.dtype}")
    with torch.no_grad():
        values = numbers(tensor).detach()
    if values.numel() == 0:
        return
    if values.is_contiguous():
        yield values.view(-1), 1
        return
    values, multiplicity = _without_expansion(values)
    if values.is_contiguous():  # no gaps and no overlaps, now that the dimensions are in order
        yield values.as_strided((values.numel(),), (1,)), multiplicity
        return
    for copy in _copies(values):
        yield copy, multiplicity


def _without_expansion(tensor: Tensor) -> tuple[Tensor, int]:
    """The elements that differ in memory, outer dimensions first, and how often each occurs."""
    multiplicity = 1
    kept: list[tuple[int, int]] = []
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        if stride == 0:
            multiplicity *= size
        elif size > 1:
            kept.append((stride, size))
    kept.sort(reverse=True)
    sizes, strides = [size for _, size in kept], [stride for stride, _ in kept]
    return tensor.as_strided(sizes, strides), multiplicity


def _copies(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.numel() <= COPY_ELEMENTS:
        yield tensor.contiguous().view(-1)
        return
    rows = max(1, COPY_ELEMENTS // math.prod(tensor.shape[1:]))
    for part in torch.split(tensor, rows):
        yield from _copies(part if part.shape[0] > 1 else part[0])
