"""Lesson 1: numbers. Bits to flip, a number to type, range and spacing of every format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from ampscope.formats import FORMATS
from ampscope.records import Curve, Reading, Result
from ampscope.rounding import exact, nearest
from app import layout, links
from app.figures.lesson_lines import Line, lines
from app.learn import number_bits
from app.learn.found import reading
from app.learn.number_table import NAMES, spread_words, table
from app.lesson import lesson_chart
from app.lesson.lesson_page import Lesson
from app.lesson.lesson_question import Answer
from app.lesson.sources import IEEE_754, NVIDIA, OCP_FP8
from app.palette import dtype_color
from app.text import escape

SYMBOLS = {"fp32": "circle", "tf32": "diamond", "bf16": "triangle-up", "fp16": "triangle-down",
           "e4m3": "star", "e5m2": "square"}  # fmt: skip
START = "0.1"
MAX_LENGTH = 40

PYTORCH = """
torch.tensor(0.1).to(torch.float16).item()             # 0.0999755859375
torch.tensor(2048., dtype=torch.float16) + 1           # 2048
torch.finfo(torch.bfloat16)                            # max, tiny, eps
"""
PADDLE_CODE = """
paddle.to_tensor(0.1).astype("float16").astype("float32").item()
paddle.to_tensor(2048.0, dtype="float16") + 1
paddle.finfo(paddle.bfloat16)
"""
KERAS_CODE = """
float(keras.ops.cast(0.1, "float16"))
keras.ops.cast(2048.0, "float16") + keras.ops.cast(1.0, "float16")
keras.ops.cast(1e-8, "float16")                        # 0
"""


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
    layout.see(spread_words(made))
    st.dataframe(made, hide_index=True, key="lesson-numbers-made")
    name = links.pick("Bits of", "format1", NAMES, default="fp16")
    number_bits.draw(FORMATS[name], nearest(text, FORMATS[name], saturates=saturates))
    st.subheader("Range and spacing", anchor=False)
    curves = [r for r in results if isinstance(r, Curve)]
    size = exact(text)
    mark = _log2(abs(size)) if size and not isinstance(size, float) else None
    figure = lines.fresh(
        [Line(c.series, c.x, relative(c), dtype_color(c.series), has_markers=False)
         for c in curves],
        x_title="size of a number", y_title="distance to the next, as a part of it", x_power=True,
        y_power=True, mark=mark,
    )  # fmt: skip
    figure.update_yaxes(tickformat=".0f")
    _mark_ends(figure, curves)
    layout.see(
        "A line begins at the smallest number of its format and ends at the largest. Lower is "
        "finer. Where it is level, each number has the same number of digits; at its left end "
        "numbers are subnormal, and have fewer the smaller they are. The dashed line is your "
        "number. tf32 is not drawn: it has the range of fp32 and the digits of fp16."
    )
    lesson_chart.show(figure, "lesson-numbers-spacing", _spacing_table(curves), agreement(results))
    st.caption(escape(agreement(results)))


def _log2(size: Fraction) -> float:
    """Also of what is no float any more."""
    return math.log2(size.numerator) - math.log2(size.denominator)


def relative(curve: Curve) -> list[float]:
    """log2 of the spacing as a part of the number itself."""
    return [y - x for x, y in zip(curve.x, curve.y, strict=True)]


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


def _typed() -> str:
    """A number; what is none is refused with a sentence."""
    links.show("widget:number1", links.wanted("number1") or START)
    typed = st.text_input("A number", key="widget:number1", max_chars=MAX_LENGTH, on_change=_keep,
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


def _keep() -> None:
    links.keep("number1", st.session_state["widget:number1"].strip() or None)
    links.keep("bits1", None)


def _spacing_table(curves: Sequence[Curve]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"format": c.series, "size": f"2^{x:.0f}", "spacing": f"2^{y:.0f}"}
            for c in curves
            for x, y in zip(c.x, c.y, strict=True)
        ]
    )


LESSON = Lesson(
    id="numbers",
    question="What is 2048 + 1 in fp16?",
    choices=("2049", "2048", "2050", "Inf"),
    answer=answer,
    draw=draw,
    terms=("exponent", "mantissa", "spacing", "subnormal", "NaN", "Inf"),
    code={"PyTorch": PYTORCH, "Paddle": PADDLE_CODE, "Keras": KERAS_CODE},
    sources=(IEEE_754, OCP_FP8, NVIDIA),
)
