"""What a crooked size costs: one dimension of a product, or the channels of a convolution, at
8n + {0, 1, 2, 4}, the others kept at a multiple of 8.

Tensor Cores and vector units read 16 bytes at a time, which are 8 halves: rows that begin at other
places are read in smaller pieces, or by other kernels.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ampscope.measure.interleaving import LEAST, Call, Stop, first_time, interleaved
from ampscope.measure.products import OPERANDS, Matrices, product, random_tensor
from ampscope.measure.square_products import rate, reason
from ampscope.records import Rate, Timing
from ampscope.store.writer import RunWriter

STEP, OFFSETS = 8, (0, 1, 2, 4)
PERIODS = (-1, 0, 1)  # n before, at and after the size: a cost must show at each to be one
DTYPES = ("fp16", "bf16", "fp32")  # fp32 for contrast: its 16 bytes are 4 numbers
SERIES = {"m": "align_m", "n": "align_n", "k": "align_k"}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
KERNEL = 3  # height and width of a convolution's filters
SHARES = 4  # of the time: three dimensions of a product, and convolutions
LEFT_OUT = "Left out: one alone takes so long that it would use up the time of the others."
LONGEST_S = 0.012  # of one product in fp32: 36 sizes in three dtypes and ten rounds of them


@dataclass(frozen=True, slots=True)
class AlignmentEffort:
    """Candidates for the size of a product, and seconds for products and convolutions together."""

    sizes: tuple[int, ...]
    budget_s: float

    @property
    def longest_s(self) -> float:
        """Of one call: all sizes of one dtype, the least number of times, within their share."""
        return self.budget_s / (SHARES * len(PERIODS) * len(OFFSETS) * LEAST)


@dataclass(frozen=True, slots=True)
class ConvShape:
    """(batch, channels, height, width) in, ``filters`` out."""

    batch: int
    channels: int
    side: int
    filters: int


# As large as a middle layer of a ResNet-50 (28 x 28); on a CPU small enough for a few milliseconds.
CONVOLUTIONS = {"cpu": ConvShape(8, 64, 28, 64), "cuda": ConvShape(64, 256, 28, 256)}


def positions(size: int) -> tuple[int, ...]:
    """``size`` is a multiple of 8: 8n + {0, 1, 2, 4} around it."""
    return tuple(size + STEP * n + offset for n in PERIODS for offset in OFFSETS)


def aligned_products(
    effort: AlignmentEffort,
    ceilings: Sequence[Rate],
    device: torch.device,
    writer: RunWriter,
    stop: Stop,
) -> None:
    """Each dimension in turn; the size and which dtypes take part follow from what was measured."""
    size = chosen_size(effort.sizes, ceilings)
    expected = {dtype: _seconds(ceilings, dtype, size) for dtype in DTYPES}
    dtypes = [d for d in DTYPES if 0 < expected[d] <= effort.longest_s]
    for dtype in DTYPES:
        if dtype not in dtypes:
            writer.add_result(rate("align_k", dtype, (size, size, size), None, LEFT_OUT))
    for dimension, series in SERIES.items():
        shapes = [
            (dtype, _shape(size, dimension, position))
            for dtype, position in itertools.product(dtypes, positions(size))
        ]
        matrices = Matrices(device)
        calls = [
            (product(dtype, shape, device, matrices), expected[dtype])
            for dtype, shape in reversed(shapes)  # the largest first
        ][::-1]
        timings = interleaved(calls, device, effort.budget_s / SHARES, stop)
        for (dtype, shape), timing in zip(shapes, timings, strict=True):
            writer.add_result(rate(series, dtype, shape, timing))
        writer.flush()


def chosen_size(sizes: Sequence[int], ceilings: Sequence[Rate]) -> int:
    """The largest at which an fp32 product is short enough to be made hundreds of times."""
    fitting = [s for s in sizes if 0 < _seconds(ceilings, "fp32", s) <= LONGEST_S]
    return max(fitting, default=min(sizes))


def aligned_convolutions(
    effort: AlignmentEffort, device: torch.device, writer: RunWriter, stop: Stop
) -> None:
    """Input channels at 8n + {0, 1, 2, 4}, in both layouts."""
    base = CONVOLUTIONS[device.type]
    kept: list[tuple[str, str, int]] = []
    calls: list[tuple[Call, float]] = []
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        found, note = _convolutions(dtype, layout, base, device, effort.longest_s)
        kept += [(dtype, layout, channels) for channels, _, _ in found]
        calls += [(call, took) for _, call, took in found]
        if note:
            writer.add_result(_conv_rate(dtype, layout, base, base.channels, None, note))
    timings = interleaved(calls, device, effort.budget_s / SHARES, stop)
    for (dtype, layout, channels), timing in zip(kept, timings, strict=True):
        writer.add_result(_conv_rate(dtype, layout, base, channels, timing))
    writer.flush()


def _convolutions(
    dtype: str, layout: str, base: ConvShape, device: torch.device, longest_s: float
) -> tuple[list[tuple[int, Call, float]], str]:
    """(channels, call, about how long it takes) of each, or why there are none."""
    found: list[tuple[int, Call, float]] = []
    for channels in positions(base.channels):
        try:
            call = convolution(dtype, layout, base, channels, device)
            took = first_time(call, device)
        except (RuntimeError, NotImplementedError) as error:
            return [], reason(error)
        if not found and took > longest_s:
            return [], LEFT_OUT
        found.append((channels, call, took))
    return found, ""


def convolution(
    dtype: str, layout: str, base: ConvShape, channels: int, device: torch.device
) -> Call:
    """A 3 x 3 convolution that keeps height and width; fp32 without TF32."""
    memory = LAYOUTS[layout]
    operand = OPERANDS[dtype]
    data = random_tensor((base.batch, channels, base.side, base.side), operand, device)
    data = data.to(memory_format=memory)
    weight = random_tensor((base.filters, channels, KERNEL, KERNEL), operand, device)
    weight = weight.to(memory_format=memory)

    def call() -> None:
        if device.type == "cuda":
            torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
        torch.conv2d(data, weight, padding=KERNEL // 2)

    return call


def _conv_rate(
    dtype: str, layout: str, base: ConvShape, channels: int, timing: Timing | None, note: str = ""
) -> Rate:
    shape = (base.batch, channels, base.side, base.side, base.filters)
    outputs = base.batch * base.side**2 * base.filters
    weights = base.filters * channels * KERNEL**2
    numbers = base.batch * channels * base.side**2 + weights + outputs
    return Rate(
        series="align_channels",
        op="conv2d",
        dtype=dtype,
        shape=shape,
        flops=2 * outputs * channels * KERNEL**2,
        moved_bytes=numbers * OPERANDS[dtype].itemsize,
        timing=timing,
        measured_at=time.time(),
        layout=layout,
        note=note,
    )


def _shape(size: int, dimension: str, position: int) -> tuple[int, int, int]:
    m, n, k = (position if name == dimension else size for name in SERIES)
    return m, n, k


def _seconds(ceilings: Sequence[Rate], dtype: str, size: int) -> float:
    """Of one square product, as measured; 0 where it was not."""
    for found in ceilings:
        if found.dtype == dtype and found.shape[0] == size and found.timing is not None:
            return found.timing.median_s
    return 0.0
