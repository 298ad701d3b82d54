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
from ampscope.numerics.histogram import ABOVE, BELOW, FIRST, LOWEST, NAN, POS_INF, POS_ZERO, RAW_LEN

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


# The exponent histogram in plain torch: any device, any float dtype, no compiler, no transfer.
#
# It serves where the compiled counters do not reach: fp64, the rarer 8-bit formats, a machine
# without numba or Triton, other accelerators. Only integer arithmetic touches the numbers, so that
# flush-to-zero modes (``torch.set_flush_denormal``, some accelerators) change nothing.


# Elements at a time. The indices and their temporaries take about 40 bytes an element: 40 MiB.
BLOCK = 1 << 20


def count_flat(flat: Tensor) -> Tensor:
    """Raw row (int64, on the tensor's device) of a flat tensor of any real float dtype.

    Nothing waits for the device, so that it may be called for every tensor of a step.
    """
    row = torch.zeros(RAW_LEN, dtype=torch.int64, device=flat.device)
    for block in torch.split(flat, BLOCK):
        indices = bin_indices(block)
        if flat.device.type == "cpu":
            row += torch.bincount(indices, minlength=RAW_LEN)
        else:  # bincount asks the device for the largest index, and waits
            one = torch.ones((), dtype=torch.int64, device=flat.device)
            row.scatter_add_(0, indices.to(torch.int64), one.expand_as(indices))
    return row


def bin_indices(values: Tensor) -> Tensor:
    """For each element the index of its bin in a raw row."""
    if values.dtype is torch.float64:
        return _indices_of_64_bits(values.view(torch.int64))
    return _indices_of_32_bits(_fp32_bits(values))


def _fp32_bits(values: Tensor) -> Tensor:
    """Bits of the same numbers in fp32, which holds every narrower format exactly."""
    if values.dtype is torch.bfloat16:  # its bits are the upper half; a conversion might flush
        return values.view(torch.int16).to(torch.int32) << 16
    return values.to(torch.float32).view(torch.int32)


def _indices_of_32_bits(bits: Tensor) -> Tensor:
    magnitude = bits & 0x7FFFFFFF
    # An integer below 2^24 is exact in fp32: its exponent is the position of its highest bit.
    highest = (magnitude.to(torch.float32).view(torch.int32) >> 23) - 127
    exponent_field = magnitude >> 23
    normal = exponent_field - 127 - LOWEST + FIRST
    bins = torch.where(exponent_field > 0, normal, highest + FIRST)
    return _with_specials(bins, magnitude, 0xFF << 23, bits < 0)


def _indices_of_64_bits(bits: Tensor) -> Tensor:
    magnitude = bits & 0x7FFFFFFFFFFFFFFF
    bins = (magnitude >> 52) - 1023 - LOWEST + FIRST
    return _with_specials(bins.clamp(BELOW, ABOVE), magnitude, 0x7FF << 52, bits < 0)


def _with_specials(bins: Tensor, magnitude: Tensor, infinity: int, negative: Tensor) -> Tensor:
    """Bins of the finite non-zero numbers, corrected for zeros, infinities and NaNs."""
    sign = negative.to(bins.dtype)
    bins = torch.where(magnitude == 0, POS_ZERO + sign, bins)
    bins = torch.where(magnitude == infinity, POS_INF + sign, bins)
    return bins.masked_fill(magnitude > infinity, NAN)
