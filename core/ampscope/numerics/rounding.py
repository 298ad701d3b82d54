"""Rounding to a number format and its bit patterns, in exact arithmetic.

    >>> from ampscope.numerics.formats import FP16
    >>> nearest("2049", FP16), toward_zero("2049.9", FP16), nearest("70000", FP16)
    (2048.0, 2048.0, inf)
    >>> f"{encode(1.5, FP16):016b}", decode(0b0_10000_1000000000, FP16)
    ('0011111000000000', 3.0)

To nearest, ties go to the even mantissa, and what rounds beyond the largest number becomes infinite
(IEEE 754-2019, section 4.3.1). In ``e4m3``, which has no infinity, it becomes NaN, or the largest
number where a conversion saturates (the OCP FP8 specification knows both). Toward zero it stays the
largest number.
"""

from __future__ import annotations

import math
from fractions import Fraction

from ampscope.numerics.formats import NumberFormat

Number = str | int | float | Fraction
_SPECIAL = {"nan": math.nan, "inf": math.inf, "+inf": math.inf, "-inf": -math.inf}


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


def exact(value: Number) -> Fraction | float:
    """The number itself; a float only for NaN and infinities. Raises ValueError for other texts."""
    if isinstance(value, str) and value.strip().lower() in _SPECIAL:
        return _SPECIAL[value.strip().lower()]
    if isinstance(value, float) and not math.isfinite(value):
        return value
    return Fraction(value)


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
