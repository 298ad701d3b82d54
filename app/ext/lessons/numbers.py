"""Lesson 1: numbers. Bits to flip, a number to type, range and spacing of every format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from ampscope.numerics.formats import FORMATS, NumberFormat
from ampscope.numerics.rounding import decode, encode, exact, nearest, toward_zero, width
from ampscope.records import Curve, Reading, Result
from ampscope.story.palette import dtype_color
from app import chart, links
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import SYMBOLS, Trace, lines
from app.ext.lessons.lesson_page import MeasuredLesson
from app.ext.lessons.lesson_runs import reading
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import escape

START = "0.1"
MAX_LENGTH = 40
NAMES = ("fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2")
_BITS = "bits1"  # of the address: a pattern; without one it is that of the number that was typed


def answer(results: Sequence[Result]) -> Answer:
    """What torch made of 2048 + 1 in fp16."""
    fp16, fp32 = (reading(results, "2048 + 1", name) for name in ("fp16", "fp32"))
    choice = {2049.0: 0, 2048.0: 1, 2050.0: 2}.get(fp16, 3)
    ends = {n: reading(results, "1 no longer counts from", n) for n in ("fp16", "bf16", "fp32")}
    return Answer(
        choice,
        f"torch gives {fp16:,.0f} in fp16 and {fp32:,.0f} in fp32. Adding 1 stops to count at "
        f"{ends['bf16']:,.0f} in bf16, {ends['fp16']:,.0f} in fp16, {ends['fp32']:,.0f} in fp32.",
    )


def draw(results: Sequence[Result]) -> None:
    """The number, its bits, and every format's range and spacing."""
    saturates = bool(reading(results, "saturates", "e4m3"))
    text = _typed()
    made = table(text, saturates=saturates)
    chart.see(spread_words(made))
    st.dataframe(made, hide_index=True, key="lesson-numbers-made")
    name = links.pick("Bits of", "format1", NAMES, default="fp16")
    draw_bits(FORMATS[name], nearest(text, FORMATS[name], saturates=saturates))
    st.subheader("Range and spacing", anchor=False)
    curves = [r for r in results if isinstance(r, Curve)]
    size = exact(text)
    mark = _log2(abs(size)) if size and not isinstance(size, float) else None
    figure = lines.fresh(
        [Trace(c.series, c.x, relative(c), dtype_color(c.series), has_markers=False)
         for c in curves],
        x_title="size of a number", y_title="distance to the next, as a part of it", x_power=True,
        y_power=True, mark=mark,
    )  # fmt: skip
    figure.update_yaxes(tickformat=".0f")
    _mark_ends(figure, curves)
    text = (
        "A line begins at the smallest number of its format and ends at the largest. Lower is "
        "finer. Where it is level, each number has the same number of digits; at its left end "
        "numbers are subnormal, and have fewer the smaller they are. The dashed line is your "
        "number. tf32 is not drawn: it has the range of fp32 and the digits of fp16."
    )
    lesson_page.show_chart(
        figure, "lesson-numbers-spacing", _spacing_table(curves), text, alt=agreement(results)
    )
    st.caption(escape(agreement(results)))


def _typed() -> str:
    """The typed number; anything else is refused with a sentence."""
    wanted = links.wanted("number1") or START
    key = links.widget_key("number1", wanted)
    typed = st.text_input("A number", wanted, key=key, max_chars=MAX_LENGTH, on_change=_keep,
                          args=(key,),
                          help="For example 0.1, 2049, 1e-8, 70000, inf, 1/3").strip()  # fmt: skip
    try:
        if "e" in typed.lower() and abs(int(typed.lower().partition("e")[2])) > 400:
            raise ValueError
        if len(typed) > MAX_LENGTH:  # the address knows no bound
            raise ValueError
        exact(typed)
    except (ValueError, ZeroDivisionError):
        st.warning(f"That is no number, so {START} is shown. Type for example 0.1, 1e-8 or 1/3.")
        return START
    return typed


def _keep(key: str) -> None:
    links.keep("number1", st.session_state[key].strip() or None)
    links.keep(_BITS, None)


def table(text: str, *, saturates: bool) -> pd.DataFrame:
    """What each format makes of a number, both ways."""
    rows = []
    for name in NAMES:
        fmt = FORMATS[name]
        near, cut = nearest(text, fmt, saturates=saturates), toward_zero(text, fmt)
        rows.append(
            {
                "format": name,
                "to nearest": _digits(near),
                "error": _error(text, near),
                "by truncation": _digits(cut),
                "error then": _error(text, cut),
                "bits": f"{encode(near, fmt):0{width(fmt)}b}",
                "largest": f"{fmt.max:,.0f}" if fmt.max < 1e6 else f"{fmt.max:.4g}",
                "smallest": f"{fmt.min_subnormal:.2g}",
            }
        )
    return pd.DataFrame(rows)


def _digits(value: float) -> str:
    return f"{value:.9g}" if math.isfinite(value) else {math.inf: "Inf", -math.inf: "-Inf"}.get(
        value, "NaN"
    )  # fmt: skip


def _error(text: str, value: float) -> str:
    number = exact(text)
    if isinstance(number, float):
        return "exact" if number == value or (number != number and value != value) else "no figure"
    if not math.isfinite(value):
        return "all of it"
    if number == value:
        return "exact"
    share = float(abs(Fraction(value) - number) / abs(number))
    return f"{share:.2%}" if share > 1e-4 else f"{share:.1e}"


def spread_words(made: pd.DataFrame) -> str:
    """Which formats keep the number, computed from the table."""
    kept = [r["format"] for _, r in made.iterrows() if r["error"] == "exact"]
    if len(kept) == len(made):
        return "Every format holds this number exactly."
    if not kept:
        return "No format holds this number exactly: each keeps the nearest that it has."
    return f"Exact in {', '.join(kept)}; the others keep the nearest that they have."


def draw_bits(fmt: NumberFormat, value: float) -> None:
    """The bits of a number as switches, each with its weight, and the number that they make."""
    pattern = chosen(fmt, value)
    first, last = 1, 1 + fmt.exponent_bits
    chart.see(bits_reading(pattern, fmt))
    _part("Sign", fmt, pattern, range(first), ["minus"])
    weights = [f"{2 ** (fmt.exponent_bits - 1 - i)}" for i in range(fmt.exponent_bits)]
    _part(f"Exponent (what is on adds up; less {fmt.bias})", fmt, pattern, range(1, last), weights)
    weights = [f"1/{2 ** (i + 1)}" for i in range(fmt.mantissa_bits)]
    _part("Mantissa (what is on adds up)", fmt, pattern, range(last, width(fmt)), weights)


def chosen(fmt: NumberFormat, value: float) -> str:
    """The URL's pattern where it is one of this format, else the number's own."""
    asked = links.wanted(_BITS)
    if len(asked) == width(fmt) and set(asked) <= {"0", "1"}:
        return asked
    return f"{encode(value, fmt):0{width(fmt)}b}"


def bits_reading(pattern: str, fmt: NumberFormat) -> str:
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
    on = [place for place in places if pattern[place] == "1"]
    key = links.widget_key(f"{_BITS}:{fmt.name}:{places.start}", on)
    st.pills(
        label,
        list(places),
        selection_mode="multi",
        default=on,
        key=key,
        format_func=lambda place: weights[place - places.start],
        on_change=_flip,
        args=(key, pattern, places),
    )


def _flip(key: str, pattern: str, places: range) -> None:
    on = set(st.session_state[key])
    bits = [("1" if i in on else "0") if i in places else bit for i, bit in enumerate(pattern)]
    links.keep(_BITS, "".join(bits))


def relative(curve: Curve) -> list[float]:
    """log2 of the spacing as a part of the number itself."""
    return [y - x for x, y in zip(curve.x, curve.y, strict=True)]


def _log2(size: Fraction) -> float:
    """Also of what is no float any more."""
    return math.log2(size.numerator) - math.log2(size.denominator)


def _mark_ends(figure: go.Figure, curves: Sequence[Curve]) -> None:
    """A symbol at both ends, and the format's name at one of them."""
    for curve in curves:
        name, y = curve.series, relative(curve)
        ends = {"x": [curve.x[0], curve.x[-1]], "y": [y[0], y[-1]]}
        marker = {"color": dtype_color(name), "symbol": SYMBOLS[name], "size": 10}
        figure.add_trace(go.Scatter(**ends, mode="markers", marker=marker, showlegend=False,
                                    hoverinfo="skip"))  # fmt: skip
        figure.add_annotation(
            x=curve.x[-1], y=y[-1], text=f"<b>{name}</b>", showarrow=False, xanchor="right",
            yshift=-14 if name == "e4m3" else 14,
        )  # fmt: skip


def _spacing_table(curves: Sequence[Curve]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"format": c.series, "size": f"2^{x:.0f}", "spacing": f"2^{y:.0f}"}
            for c in curves
            for x, y in zip(c.x, c.y, strict=True)
        ]
    )


def agreement(results: Sequence[Result]) -> str:
    """How often torch and this page's arithmetic were compared, and how often they agreed."""
    read = [r for r in results if isinstance(r, Reading)]
    total = sum(r.value for r in read if r.name in ("bit patterns", "roundings"))
    alike = sum(r.value for r in read if r.name in ("bit patterns alike", "roundings alike"))
    return (
        f"This page computes with whole numbers. torch on this machine was asked {int(total):,} "
        f"times, for bit patterns and roundings of five formats, and gave the same "
        f"{int(alike):,} times. The spacing in the chart is torch's."
    )


CODE = {
    "PyTorch": """
torch.tensor(0.1).to(torch.float16).item()             # 0.0999755859375
torch.tensor(2048., dtype=torch.float16) + 1           # 2048
torch.finfo(torch.bfloat16)                            # max, tiny, eps
""",
    "Paddle": """
paddle.to_tensor(0.1).astype("float16").astype("float32").item()
paddle.to_tensor(2048.0, dtype="float16") + 1
paddle.finfo(paddle.bfloat16)
""",
    "Keras": """
float(keras.ops.cast(0.1, "float16"))
keras.ops.cast(2048.0, "float16") + keras.ops.cast(1.0, "float16")
keras.ops.cast(1e-8, "float16")                        # 0
""",
}
LESSON = MeasuredLesson(
    id="numbers",
    question="What is 2048 + 1 in fp16?",
    choices=("2049", "2048", "2050", "Inf"),
    answer=answer,
    draw=draw,
    terms=("exponent", "mantissa", "spacing", "subnormal", "NaN", "Inf"),
    code=CODE,
    sources=(Source.IEEE_754, Source.OCP_FP8, Source.NVIDIA),
)
