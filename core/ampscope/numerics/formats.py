"""Floating-point formats, every limit derived from two integers (exponent bits, mantissa bits).

A binary format with *e* exponent and *m* mantissa bits has bias 2^(e-1)-1; its smallest normal
number is 2^(1-bias), its smallest subnormal 2^(1-bias-m), its largest finite number
2^bias * (2 - 2^-m) (IEEE 754-2019, section 3.3). ``e4m3`` is the OCP FP8 variant without
infinities, whose top code is NaN: its largest number is 448 (OCP 8-bit FP specification, 2023).

    >>> FP16.max, FP16.min_normal_exponent, FP16.min_subnormal_exponent
    (65504.0, -14, -24)

Also here: rounding to a format and its bit patterns, in exact arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


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


# Rounding to a number format and its bit patterns, in exact arithmetic.
#
#     >>> nearest("2049", FP16), toward_zero("2049.9", FP16), nearest("70000", FP16)
#     (2048.0, 2048.0, inf)
#     >>> f"{encode(1.5, FP16):016b}", decode(0b0_10000_1000000000, FP16)
#     ('0011111000000000', 3.0)
#
# To nearest, ties go to the even mantissa, and what rounds beyond the largest number becomes
# infinite (IEEE 754-2019, section 4.3.1). In ``e4m3``, which has no infinity, it becomes NaN, or
# the largest number where a conversion saturates (the OCP FP8 specification knows both). Toward
# zero it stays the largest number.


Number = str | int | float | Fraction
_SPECIAL = {"nan": math.nan, "inf": math.inf, "+inf": math.inf, "-inf": -math.inf}


def exact(value: Number) -> Fraction | float:
    """The number itself; a float only for NaN and infinities. Raises ValueError for other texts."""
    if isinstance(value, str) and value.strip().lower() in _SPECIAL:
        return _SPECIAL[value.strip().lower()]
    if isinstance(value, float) and not math.isfinite(value):
        return value
    return Fraction(value)


def nearest(value: Number, fmt: NumberFormat, *, saturates: bool = False) -> float:
    """To the nearest number of the format, ties to even. ``saturates`` is about formats without an
    infinity alone."""
    rounded, number = _rounded(value, fmt, is_nearest=True), exact(value)
    is_nan = isinstance(number, float) and math.isnan(number)
    if saturates and not fmt.has_infinity and not math.isfinite(rounded) and not is_nan:
        return -fmt.max if number < 0 else fmt.max  # 1e400 is a number and no float
    return rounded


def toward_zero(value: Number, fmt: NumberFormat) -> float:
    """To the next number of the format on the side of zero: the rest of the digits is cut off."""
    return _rounded(value, fmt, is_nearest=False)


def width(fmt: NumberFormat) -> int:
    """Bits of a number."""
    return 1 + fmt.exponent_bits + fmt.mantissa_bits


def decode(bits: int, fmt: NumberFormat) -> float:
    """The number that a bit pattern stands for."""
    sign = -1.0 if bits >> (width(fmt) - 1) & 1 else 1.0
    field = bits >> fmt.mantissa_bits & (2**fmt.exponent_bits - 1)
    mantissa = bits & (2**fmt.mantissa_bits - 1)
    if field == 2**fmt.exponent_bits - 1:
        if fmt.has_infinity:
            return sign * math.inf if mantissa == 0 else math.nan
        if mantissa == 2**fmt.mantissa_bits - 1:
            return math.nan
    if field == 0:
        return float(sign * mantissa * fmt.min_subnormal)
    return sign * math.ldexp(2**fmt.mantissa_bits + mantissa, field - fmt.bias - fmt.mantissa_bits)


def encode(value: float, fmt: NumberFormat) -> int:
    """The bit pattern of a number that the format has; of NaN the one with every bit but the sign
    set."""
    top = 1 << (width(fmt) - 1)
    if math.isnan(value):
        return top - 1
    sign = top if math.copysign(1.0, value) < 0 else 0
    size = abs(value)
    if math.isinf(size):
        return int(sign | (2**fmt.exponent_bits - 1) << fmt.mantissa_bits)
    if size < fmt.min_normal:
        return sign | int(size / fmt.min_subnormal)
    exponent = math.frexp(size)[1] - 1
    mantissa = int((size / 2.0**exponent - 1) * 2**fmt.mantissa_bits)
    return sign | (exponent + fmt.bias) << fmt.mantissa_bits | mantissa


def _rounded(value: Number, fmt: NumberFormat, *, is_nearest: bool) -> float:
    number = exact(value)
    if isinstance(number, float):
        return number if fmt.has_infinity or math.isnan(number) else math.nan
    size = abs(number)
    if size == 0:
        return math.copysign(0.0, value) if isinstance(value, float) else 0.0
    spacing = Fraction(2) ** (max(_exponent(size), fmt.min_normal_exponent) - fmt.mantissa_bits)
    steps, rest = divmod(size, spacing)
    if is_nearest and (2 * rest > spacing or (2 * rest == spacing and steps % 2)):
        steps += 1
    rounded = steps * spacing
    if rounded > Fraction(fmt.max):
        beyond = math.inf if fmt.has_infinity else math.nan
        rounded_size = beyond if is_nearest else fmt.max
    else:
        rounded_size = float(rounded)
    return -rounded_size if number < 0 else rounded_size


def _exponent(size: Fraction) -> int:
    """Of the largest power of two that is no larger."""
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if Fraction(2) ** guess <= size else guess - 1
