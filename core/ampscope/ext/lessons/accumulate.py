"""Lesson 10: the same numbers added one after the other, in half and in fp32.

    running sum     8,192 times the same term into a half accumulator; into an fp32 one
    a product       of two vectors, longer and longer: half accumulator, fp32 accumulator with one
                    rounding at the end (what a Tensor Core does), against fp64

Each addition is torch's own in the dtype. torch.sum of a half tensor adds in fp32; it is shown too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.records import Curve, Reading, Result

INFO = LessonInfo(
    id="accumulate",
    number=10,
    title="Accumulate in fp32",
    icon="functions",
    sentence="A running sum in half precision stops growing long before it is done.",
    settings={"term": ("1", "0.1", "0.01")},
)
TERMS, EVERY = 8192, 64
LENGTHS = tuple(2**k for k in range(4, 14))
PRODUCTS = 64  # of each length: the mean error is shown
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """Running sums, where they stop, torch.sum; errors of dot products."""
    term = float(asked["term"])
    for name, dtype in DTYPES.items():
        yield from _running(name, torch.tensor(term, dtype=dtype, device=device))
    ones = torch.full((TERMS,), term, dtype=torch.float16, device=device)
    yield Reading("torch.sum", "fp16", float(ones.sum()))
    yield Reading("right", "fp64", float(ones.double().sum()))
    left = torch.randn(PRODUCTS, max(LENGTHS), device=device).half()
    right = torch.randn(PRODUCTS, max(LENGTHS), device=device).half()
    # Positive numbers: sums that grow, as those of squares in a norm do.
    yield from _products(left.abs(), right.abs())


def _running(name: str, term: Tensor) -> Iterator[Result]:
    total = torch.zeros_like(term)
    counts, sums = [0.0], [0.0]
    stopped = None
    for number in range(1, TERMS + 1):
        after = total + term
        if stopped is None and bool(after == total):
            stopped = number - 1
        total = after
        if number % EVERY == 0:
            counts.append(float(number))
            sums.append(float(total))
    yield Curve("sum", name, tuple(counts), tuple(sums))
    yield Reading("stopped after", name, float("inf") if stopped is None else float(stopped))


def _products(left: Tensor, right: Tensor) -> Iterator[Curve]:
    """Relative error of the product of the first so many numbers."""
    products = left * right  # fp16 times fp16, rounded to fp16, as a half multiplier gives it
    exact = torch.cumsum(left.double() * right.double(), 1)
    half = torch.zeros_like(products[:, 0])
    errors: dict[str, list[float]] = {"half accumulator": [], "fp32 accumulator": []}
    at = 0
    for length in LENGTHS:
        while at < length:
            half = half + products[:, at]
            at += 1
        wide = torch.cumsum(left[:, :length].float() * right[:, :length].float(), 1)[:, -1].half()
        wanted = exact[:, length - 1]
        errors["half accumulator"].append(float(((half.double() - wanted) / wanted).abs().mean()))
        errors["fp32 accumulator"].append(float(((wide.double() - wanted) / wanted).abs().mean()))
    for name, found in errors.items():
        yield Curve("error", name, tuple(map(float, LENGTHS)), tuple(found))
