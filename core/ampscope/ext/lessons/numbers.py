"""Lesson 1: torch's own numbers compared with the page's arithmetic.

    every bit pattern (of fp32: some)    decoded by torch and by ampscope.numerics.formats
    random numbers, normal to tiny       converted by torch and by ampscope.numerics.formats
    2^k and the next larger number       the spacing, by torch's own bits
    2^k + 1                              from where on 1 no longer counts

tf32 is missing: it is how a Tensor Core reads fp32, and no tensor has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.numerics.formats import FORMATS, NumberFormat
from ampscope.numerics.rounding import decode, nearest, width
from ampscope.records import Curve, Reading, Result

INFO = LessonInfo(
    id="numbers",
    number=1,
    title="Numbers",
    icon="pin",
    sentence="Every format is a sign, an exponent and a mantissa; flip their bits and see what is "
    "left of a number.",
)
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
PATTERNS = 65_536  # all there are of a 16-bit format
RANDOM = 5_000


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """Agreement, spacing and the end of counting, format by format."""
    for name, dtype in DTYPES.items():
        fmt = FORMATS[name]
        yield from _patterns(fmt, dtype)
        yield from _roundings(fmt, dtype)
        yield _spacing(fmt, dtype)
        yield Reading("1 no longer counts from", name, _end_of_counting(fmt, dtype))
        yield Reading("2048 + 1", name, float(_add_one(2048.0, dtype)))


def _patterns(fmt: NumberFormat, dtype: torch.dtype) -> Iterator[Reading]:
    bits = width(fmt)
    step = max(2**bits // PATTERNS, 1)
    codes = [place * step + place % step for place in range(min(2**bits, PATTERNS))]
    values = _from_bits(codes, fmt, dtype).double().tolist()
    same = sum(_same(decode(c, fmt), v) for c, v in zip(codes, values, strict=True))
    yield Reading("bit patterns", fmt.name, len(codes))
    yield Reading("bit patterns alike", fmt.name, same)


def _roundings(fmt: NumberFormat, dtype: torch.dtype) -> Iterator[Reading]:
    """Numbers from far below the smallest to above the largest of the format, in fp32."""
    low, high = max(fmt.min_subnormal_exponent - 2, -149), min(fmt.max_exponent + 2, 127)
    exponents = torch.empty(RANDOM).uniform_(low, high).floor()
    numbers = (torch.rand(RANDOM) + 1) * 2**exponents * torch.randn(RANDOM).sign()
    saturates = not fmt.has_infinity and math.isfinite(float(torch.tensor(2 * fmt.max).to(dtype)))
    torchs = numbers.to(dtype).double().tolist()
    pairs = zip(numbers.double().tolist(), torchs, strict=True)
    same = sum(_same(nearest(n, fmt, saturates=saturates), value) for n, value in pairs)
    yield Reading("saturates", fmt.name, float(saturates))  # releases of torch differ in e4m3
    yield Reading("roundings", fmt.name, RANDOM)
    yield Reading("roundings alike", fmt.name, same)


def _spacing(fmt: NumberFormat, dtype: torch.dtype) -> Curve:
    """log2 of the distance from 2^k to the next number, by adding 1 to the bits."""
    exponents = list(range(fmt.min_subnormal_exponent, fmt.max_exponent + 1))
    powers = torch.tensor([2.0**e for e in exponents], dtype=torch.float64)
    held = powers.to(torch.float32).to(dtype)
    # uint8 has no wrap to fear here: the next pattern of a power of two is finite
    following = (held.view(_INTEGERS[width(fmt)]) + 1).view(dtype)
    distance = following.double() - held.double()
    return Curve("spacing", fmt.name, tuple(map(float, exponents)), tuple(distance.log2().tolist()))


def _end_of_counting(fmt: NumberFormat, dtype: torch.dtype) -> float:
    """The smallest 2^k with 2^k + 1 == 2^k in the format."""
    powers = (2.0**e for e in range(fmt.max_exponent + 1))
    return next((p for p in powers if float(_add_one(p, dtype)) == p), math.inf)


def _add_one(value: float, dtype: torch.dtype) -> Tensor:
    """torch adds no fp8 numbers: those are added in fp32 and rounded, as the units of a GPU do."""
    if dtype.itemsize == 1:
        return (torch.tensor(value).to(dtype).float() + 1).to(dtype)
    return torch.tensor(value, dtype=dtype) + torch.tensor(1.0, dtype=dtype)


def _from_bits(codes: list[int], fmt: NumberFormat, dtype: torch.dtype) -> Tensor:
    bits = width(fmt)
    half = 2 ** (bits - 1)
    signed = codes if bits == 8 else [c - 2**bits if c >= half else c for c in codes]
    return torch.tensor(signed, dtype=_INTEGERS[bits]).view(dtype)


def _same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))
