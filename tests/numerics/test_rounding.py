"""Rounding and bit patterns against numpy's fp16, struct's fp32 and torch's fp8 and bf16."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampscope.numerics.formats import (
    BF16,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    TF32,
)
from ampscope.numerics.rounding import decode, encode, nearest, toward_zero, width


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


@given(st.floats(width=64))
def test_fp16_to_nearest_is_numpys(value: float) -> None:
    with np.errstate(over="ignore"):
        assert same(nearest(value, FP16), float(np.float16(value)))


@given(st.floats(width=32))
def test_fp32_patterns_are_structs(value: float) -> None:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    assert same(decode(bits, FP32), value)
    assert math.isnan(value) or encode(value, FP32) == bits


@pytest.mark.parametrize(("fmt", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_every_fp8_pattern_is_torchs(fmt, dtype) -> None:  # type: ignore[no-untyped-def]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist()
    assert all(same(decode(code, fmt), value) for code, value in enumerate(values))


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "tf32", "fp32"])
@given(bits=st.integers(0, 2**32 - 1))
def test_a_number_of_the_format_comes_back_from_its_pattern(name: str, bits: int) -> None:
    fmt = FORMATS[name]
    bits %= 2 ** width(fmt)
    value = decode(bits, fmt)
    if not math.isnan(value):
        assert encode(value, fmt) == bits
        assert nearest(value, fmt) == toward_zero(value, fmt) or math.isinf(value)


def test_the_sum_of_the_lesson() -> None:
    assert nearest(2049, FP16) == 2048  # a tie, to the even mantissa
    assert nearest(2051, FP16) == 2052
    assert nearest(2049, TF32) == 2048
    assert nearest(257, BF16) == 256


def test_the_largest_numbers() -> None:
    assert nearest(65519, FP16) == 65504
    assert nearest(65520, FP16) == math.inf
    assert toward_zero(1e30, FP16) == 65504
    assert math.isnan(nearest(1000, E4M3))
    assert nearest(1000, E4M3, saturates=True) == 448
    assert nearest(-1000, E4M3, saturates=True) == -448
    assert nearest(70000, FP16, saturates=True) == math.inf  # fp16 has an infinity


def test_fractions_are_rounded_once() -> None:
    # 1 + 2^-11 + 2^-60 lies above the tie; a detour over a double would lose the last part.
    above = Fraction(1) + Fraction(1, 2**11) + Fraction(1, 2**60)
    assert nearest(above, FP16) == 1 + 2.0**-10
    assert nearest(Fraction(1) + Fraction(1, 2**11), FP16) == 1.0
    assert toward_zero("0.1", FP16) <= 0.1


def test_a_number_that_no_float_holds_is_rounded_too() -> None:
    for name, fmt in FORMATS.items():
        expected = fmt.max if name == "e4m3" else math.inf
        for sign in (1, -1):
            number = sign * Fraction(10) ** 400
            assert nearest(number, fmt, saturates=True) == sign * expected
