"""Rates as a bench would have measured them, for tests of what is said about them."""

from __future__ import annotations

from collections.abc import Mapping

from ampscope.records import Rate, Timing

MEASURED_AT = 1_760_000_000.0


def made(
    dtype: str,
    flops_s: float | None,
    shape: tuple[int, ...] = (1024, 1024, 1024),
    *,
    series: str = "ceiling",
    op: str = "matmul",
    layout: str = "",
    spread: float = 0.02,
    note: str = "",
) -> Rate:
    """A rate of so many operations per second; None is one that could not be measured."""
    flops = 2
    for size in shape:
        flops *= size
    timing = None
    if flops_s is not None:
        median = flops / flops_s
        timing = Timing(median, median * (1 - spread / 2), median * (1 + spread / 2), 40)
    return Rate(series, op, dtype, shape, flops, 12, timing, MEASURED_AT, layout, note)


def ceilings_of(tera: Mapping[str, float | None], note: str = "") -> list[Rate]:
    """One size; rates in TFLOP/s."""
    return [made(d, None if t is None else t * 1e12, note=note) for d, t in tera.items()]


def aligned(
    series: str,
    times: Mapping[int, float],
    *,
    dtype: str = "fp16",
    layout: str = "",
    spread: float = 0.02,
) -> list[Rate]:
    """Rates at the given sizes of one dimension, the others 1024; ``times`` of one multiplication
    relative to 10 TFLOP/s."""
    rates = []
    for size, relative in times.items():
        shape = {
            "align_m": (size, 1024, 1024),
            "align_n": (1024, size, 1024),
            "align_k": (1024, 1024, size),
            "align_channels": (8, size, 28, 28, 64),
        }[series]
        rates.append(
            made(dtype, 1e13 / relative, shape, series=series, layout=layout, spread=spread)
        )
    return rates
