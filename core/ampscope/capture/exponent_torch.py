"""The exponent histogram in plain torch: any device, any float dtype, no compiler, no transfer.

It serves where the compiled counters do not reach: fp64, the rarer 8-bit formats, a machine
without numba or Triton, other accelerators. Only integer arithmetic touches the numbers, so that
flush-to-zero modes (``torch.set_flush_denormal``, some accelerators) change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampscope.numerics.histogram import ABOVE, BELOW, FIRST, LOWEST, NAN, POS_INF, POS_ZERO, RAW_LEN

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
