"""Number formats, against torch.finfo and against torch's own rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampscope.numerics.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, TF32, dtype_name
from ampscope.numerics.formats import NumberFormat as Format

TORCH = {
    FP64: torch.float64,
    FP32: torch.float32,
    BF16: torch.bfloat16,
    FP16: torch.float16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}
SMALL = (FP16, BF16, E4M3, E5M2)


@pytest.mark.parametrize(("fmt", "dtype"), TORCH.items(), ids=lambda x: getattr(x, "name", None))
def test_limits_are_torchs(fmt: Format, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    assert fmt.max == info.max
    assert fmt.min_normal == info.smallest_normal
    assert fmt.epsilon == info.eps
    assert fmt.exponent_bits + fmt.mantissa_bits + 1 == info.bits


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_smallest_subnormal_is_the_first_code(fmt: Format) -> None:
    code = torch.ones(1, dtype=torch.int16 if fmt in (FP16, BF16) else torch.uint8)
    assert code.view(TORCH[fmt]).double().item() == fmt.min_subnormal


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_half_of_the_smallest_subnormal_is_the_last_that_becomes_zero(fmt: Format) -> None:
    edge = 2.0**fmt.zero_below_exponent
    values = torch.tensor([edge, math.nextafter(edge, 1.0), edge / 2 * 1.999], dtype=torch.float64)
    rounded = values.float().to(TORCH[fmt]) if fmt is not BF16 else values.to(torch.bfloat16)
    assert rounded[0].double() == 0.0  # the tie goes to the even code, which is zero
    assert rounded[2].double() == 0.0
    assert math.nextafter(edge, 1.0) > edge  # fp32 cannot hold it: see the test of zones


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16() -> None:
    assert TF32.exponent_bits == FP32.exponent_bits
    assert TF32.epsilon == FP16.epsilon


@pytest.mark.parametrize("fmt", [FP32, FP16, BF16], ids=lambda f: f.name)
@given(data=st.data())
def test_ulp_is_the_distance_to_the_next_number(fmt: Format, data: st.DataObject) -> None:
    largest = int(math.log2(fmt.max)) - 1
    exponent = data.draw(st.integers(fmt.min_subnormal_exponent, largest))
    value = torch.tensor(data.draw(st.floats(1.0, 1.99)) * 2.0**exponent).to(TORCH[fmt])
    bits = value.view(torch.int32 if fmt is FP32 else torch.int16)
    after = (bits + 1).view(TORCH[fmt])
    assert fmt.ulp(value.double().item()) == (after.double() - value.double()).item()
    assert fmt.ulp(-value.double().item()) == fmt.ulp(value.double().item())


def test_ulp_of_zero_is_the_smallest_subnormal() -> None:
    assert FP16.ulp(0.0) == FP16.min_subnormal


def test_dtype_names() -> None:
    assert {dtype_name(dtype) for dtype in TORCH.values()} == set(FORMATS) - {"tf32"}
    assert dtype_name("torch.float16") == "fp16"
    assert dtype_name(torch.int64) == "int64"
    assert dtype_name(torch.bool) == "bool"
