"""Floating-point formats, every limit derived from two integers (exponent bits, mantissa bits).

A binary format with *e* exponent and *m* mantissa bits has bias 2^(e-1)-1; its smallest normal
number is 2^(1-bias), its smallest subnormal 2^(1-bias-m), its largest finite number
2^bias * (2 - 2^-m) (IEEE 754-2019, section 3.3). ``e4m3`` is the OCP FP8 variant without
infinities, whose top code is NaN: its largest number is 448 (OCP 8-bit FP specification, 2023).

    >>> FP16.max, FP16.min_normal_exponent, FP16.min_subnormal_exponent
    (65504.0, -14, -24)
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One binary floating-point format; ``mantissa_bits`` counts the stored bits only."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        """What the stored exponent field is larger by than the exponent (15 for fp16)."""
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number (15 for fp16)."""
        return self.bias if self.has_infinity else self.bias + 1

    @property
    def min_normal_exponent(self) -> int:
        """Exponent of the smallest normal number (-14 for fp16)."""
        return 1 - self.bias

    @property
    def min_subnormal_exponent(self) -> int:
        """Exponent of the smallest subnormal number (-24 for fp16)."""
        return 1 - self.bias - self.mantissa_bits

    @property
    def max(self) -> float:
        """Largest finite number. Without infinities the all-ones mantissa is NaN: one ulp less."""
        last = 2.0**-self.mantissa_bits if self.has_infinity else 2.0 ** (1 - self.mantissa_bits)
        return float(2.0**self.max_exponent * (2.0 - last))

    @property
    def min_normal(self) -> float:
        """Smallest number with a full mantissa; smaller ones are subnormal."""
        return float(2.0**self.min_normal_exponent)

    @property
    def min_subnormal(self) -> float:
        """Smallest number above zero."""
        return float(2.0**self.min_subnormal_exponent)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number."""
        return float(2.0**-self.mantissa_bits)

    @property
    def zero_below_exponent(self) -> int:
        """Powers of two with a smaller exponent than this round to zero (to nearest, ties to even).

        Half of the smallest subnormal is a tie and goes to zero; everything above the tie in that
        same power of two goes up to the smallest subnormal.
        """
        return self.min_subnormal_exponent - 1

    def ulp(self, value: float) -> float:
        """Spacing of the format's numbers at ``value``."""
        exponent = self.min_normal_exponent if value == 0 else math.frexp(abs(value))[1] - 1
        return float(2.0 ** (max(exponent, self.min_normal_exponent) - self.mantissa_bits))


FP64 = NumberFormat("fp64", 11, 52)
FP32 = NumberFormat("fp32", 8, 23)
TF32 = NumberFormat("tf32", 8, 10)
BF16 = NumberFormat("bf16", 8, 7)
FP16 = NumberFormat("fp16", 5, 10)
E4M3 = NumberFormat("e4m3", 4, 3, has_infinity=False)
E5M2 = NumberFormat("e5m2", 5, 2)

FORMATS: dict[str, NumberFormat] = {f.name: f for f in (FP64, FP32, TF32, BF16, FP16, E4M3, E5M2)}

# torch's spelling of a dtype -> ours. Anything else (int64, bool …) keeps its own name.
DTYPE_NAMES: dict[str, str] = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


def dtype_name(torch_dtype: object) -> str:
    """``torch.float16`` (or its string) -> ``"fp16"``; other dtypes keep torch's short name."""
    short = str(torch_dtype).removeprefix("torch.")
    return DTYPE_NAMES.get(short, short)
