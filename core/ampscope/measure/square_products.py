"""Rates of square products, every dtype at several sizes: what the device reaches alone.

Sizes rise. What a product will take is predicted from the size before, so that a dtype without
instructions of its own (fp16 on most CPUs: 40 times slower than fp32) costs no more than the rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ampscope.measure.interleaving import LEAST, Call, Stop, first_time, interleaved
from ampscope.measure.products import OPERANDS, flops, moved_bytes, product, refusal
from ampscope.records import Rate, Timing
from ampscope.store.writer import RunWriter

SERIES = "ceiling"


@dataclass(frozen=True, slots=True)
class Effort:
    """How large and how long."""

    sizes: tuple[int, ...]
    budget_s: float  # for all dtypes at one size
    longest_s: float  # of the least number of calls of one dtype at one size


def square_products(
    effort: Effort, device: torch.device, writer: RunWriter, stop: Stop
) -> list[Rate]:
    """One rate a dtype and size, written as they come; those that cannot be have a note."""
    rates: list[Rate] = []
    seconds: dict[str, float] = {}  # of one product at the size before
    refused: dict[str, str] = {}
    for place, size in enumerate(effort.sizes):
        growth = (size / effort.sizes[place - 1]) ** 3 if place else 0.0
        found = _at_size(size, growth, effort, device, stop, seconds, refused)
        for rate in found:
            writer.add_result(rate)
        writer.flush()
        rates += found
    return rates


def _at_size(
    size: int,
    growth: float,
    effort: Effort,
    device: torch.device,
    stop: Stop,
    seconds: dict[str, float],
    refused: dict[str, str],
) -> list[Rate]:
    ready: list[tuple[str, Call, float]] = []
    notes: dict[str, str] = {}
    for dtype in OPERANDS:
        if dtype in refused:
            continue  # said once
        expected = seconds.get(dtype, 0.0) * growth
        if LEAST * expected > effort.longest_s:
            seconds[dtype] = expected
            notes[dtype] = (
                f"Left out: {LEAST} products of this size would take about {LEAST * expected:.3g} "
                "s, by the rate of the size before."
            )
            continue
        try:
            call, took = _prepared(dtype, size, device)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            notes[dtype] = refused[dtype] = reason(error)
            continue
        ready.append((dtype, call, took))
    timings = interleaved([(call, took) for _, call, took in ready], device, effort.budget_s, stop)
    done = dict(zip((dtype for dtype, _, _ in ready), timings, strict=True))
    seconds |= {dtype: timing.median_s for dtype, timing in done.items()}
    return [
        rate(SERIES, dtype, (size, size, size), done.get(dtype), notes.get(dtype, ""))
        for dtype in OPERANDS
        if dtype in done or dtype in notes
    ]


def _prepared(dtype: str, size: int, device: torch.device) -> tuple[Call, float]:
    reason = refusal(dtype, device)
    if reason:
        raise NotImplementedError(reason)
    call = product(dtype, (size, size, size), device)
    return call, first_time(call, device)


def rate(
    series: str, dtype: str, shape: tuple[int, int, int], timing: Timing | None, note: str = ""
) -> Rate:
    """The record of one product."""
    return Rate(
        series=series,
        op="matmul",
        dtype=dtype,
        shape=shape,
        flops=flops(shape),
        moved_bytes=moved_bytes(dtype, shape),
        timing=timing,
        measured_at=time.time(),
        note=note,
    )


def reason(error: Exception) -> str:
    """What torch says, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "There was not enough free memory on the device for its matrices."
    return str(error).strip().splitlines()[0][:200] or type(error).__name__
