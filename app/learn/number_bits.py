"""The bits of one number as switches: sign, exponent and mantissa, each bit with its weight.

The pattern lives in the URL (``?bits1=0011110000000000``); without one it is that of the number
that was typed.
"""

from __future__ import annotations

import math

import streamlit as st

from ampscope.formats import NumberFormat
from ampscope.rounding import decode, encode, width
from app import layout, links

_NAME = "bits1"


def draw(fmt: NumberFormat, value: float) -> None:
    """Switches, and the number that they make."""
    pattern = chosen(fmt, value)
    first, last = 1, 1 + fmt.exponent_bits
    layout.see(reading(pattern, fmt))
    _part("Sign", fmt, pattern, range(first), ["minus"])
    weights = [f"{2 ** (fmt.exponent_bits - 1 - i)}" for i in range(fmt.exponent_bits)]
    _part(f"Exponent (what is on adds up; less {fmt.bias})", fmt, pattern, range(1, last), weights)
    weights = [f"1/{2 ** (i + 1)}" for i in range(fmt.mantissa_bits)]
    _part("Mantissa (what is on adds up)", fmt, pattern, range(last, width(fmt)), weights)


def chosen(fmt: NumberFormat, value: float) -> str:
    """The URL's pattern where it is one of this format, else the number's own."""
    asked = links.wanted(_NAME)
    if len(asked) == width(fmt) and set(asked) <= {"0", "1"}:
        return asked
    return f"{encode(value, fmt):0{width(fmt)}b}"


def reading(pattern: str, fmt: NumberFormat) -> str:
    """``0 10000 1000000000 is + 2^1 × 1.5 = 3``"""
    field = int(pattern[1 : 1 + fmt.exponent_bits], 2)
    mantissa = int(pattern[1 + fmt.exponent_bits :], 2) / 2**fmt.mantissa_bits
    value = decode(int(pattern, 2), fmt)
    sign = "−" if pattern[0] == "1" else ""
    parts = f"{pattern[0]} {pattern[1 : 1 + fmt.exponent_bits]} {pattern[1 + fmt.exponent_bits :]}"
    if not math.isfinite(value):
        kind = "NaN" if math.isnan(value) else f"{sign}Inf"
        return f"{fmt.name} {parts} is {kind}: the top exponent is kept for what is no number."
    if field == 0:
        kind = "zero" if mantissa == 0 else "subnormal: no hidden 1 before the point"
        return (
            f"{fmt.name} {parts} is {sign}2^{fmt.min_normal_exponent} × {mantissa:.9g} = "
            f"{value:.9g}, {kind}."
        )
    return f"{fmt.name} {parts} is {sign}2^{field - fmt.bias} × {1 + mantissa:.9g} = {value:.9g}."


def _part(label: str, fmt: NumberFormat, pattern: str, places: range, weights: list[str]) -> None:
    key = f"widget:{_NAME}:{fmt.name}:{places.start}"
    links.show(key, [place for place in places if pattern[place] == "1"])
    st.pills(
        label,
        list(places),
        selection_mode="multi",
        key=key,
        format_func=lambda place: weights[place - places.start],
        on_change=_flip,
        args=(key, pattern, places),
    )


def _flip(key: str, pattern: str, places: range) -> None:
    on = set(st.session_state[key])
    bits = [("1" if i in on else "0") if i in places else bit for i, bit in enumerate(pattern)]
    links.keep(_NAME, "".join(bits))
