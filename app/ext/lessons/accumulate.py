"""Lesson 10: accumulate in fp32. Sums that stop, and dot products with two kinds of accumulator."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampscope.records import Result
from ampscope.story.palette import DTYPES, NORMAL
from app import chart
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import Trace, lines
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.lesson_runs import curve, curves, curves_table, reading
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import count, number, percent

HALF, WIDE = "half accumulator", "fp32 accumulator"
CLOSE = 0.01  # of the right sum


def answer(results: Sequence[Result]) -> Answer:
    """By where fp16's running sum ended."""
    right, half = reading(results, "right", "fp64"), curve(results, "sum", "fp16").y[-1]
    stopped = reading(results, "stopped after", "fp16")
    choice = 0 if abs(half - right) <= CLOSE * right else 2 if math.isinf(half) else 1
    by_torch = reading(results, "torch.sum", "fp16")
    return Answer(
        choice,
        f"fp16's sum stopped at {number(half)} after {stopped:,.0f} terms; the right sum is "
        f"{right:,.6g}. torch.sum, which adds in fp32, gives {by_torch:,.6g}.",
    )


def draw(results: Sequence[Result]) -> None:
    """Running sums, then errors of dot products."""
    right = reading(results, "right", "fp64")
    found = curves(results, "sum")
    chart.key_figures(
        [
            *(KeyFigure(f"Sum in {c.series}", number(c.y[-1])) for c in found),
            KeyFigure("torch.sum of fp16", number(reading(results, "torch.sum", "fp16")),
                      "It adds up in fp32 and rounds once."),
        ]
    )  # fmt: skip
    symbols = {"fp16": "dash", "bf16": "dot", "fp32": "solid"}
    figure = lines.fresh(
        [Trace(c.series, c.x, c.y, DTYPES[c.series], dash=symbols[c.series], has_markers=False)
         for c in found],
        x_title="terms added", y_title="sum",
    )  # fmt: skip
    figure.add_hline(y=right, line={"width": 1, "dash": "dash"}, annotation_text="right sum")
    lesson_page.show_chart(figure, "lesson-accumulate", curves_table(found, "terms"),
                           stop_words(results))  # fmt: skip
    errors = curves(results, "error")
    looks = {HALF: (DTYPES["fp16"], "x", "dash"), WIDE: (NORMAL, "square", "solid")}
    figure = lines(
        [Trace(c.series, c.x, c.y, *looks[c.series]) for c in errors],
        x_title="length of the dot product", y_title="mean relative error", x_log=True, y_log=True,
    )  # fmt: skip
    lesson_page.show_chart(figure, "lesson-accumulate-products", curves_table(errors, "length"),
                      product_words(results))  # fmt: skip


def stop_words(results: Sequence[Result]) -> str:
    """Where each running sum stopped."""
    parts = []
    for one in curves(results, "sum"):
        after = reading(results, "stopped after", one.series)
        where = (
            "never" if math.isinf(after) else f"at {number(one.y[-1])}, after {after:,.0f} terms"
        )
        parts.append(f"{one.series} {where}")
    return (
        f"A sum stops when a term is half of its spacing or less. It stopped: {', '.join(parts)}."
    )


def product_words(results: Sequence[Result]) -> str:
    """Errors of the longest dot product."""
    half, wide = (curve(results, "error", name) for name in (HALF, WIDE))
    return (
        f"A dot product of {count(int(half.x[-1]))} positive fp16 numbers is off by "
        f"{percent(half.y[-1])} with a half accumulator and by {percent(wide.y[-1])} with an fp32 "
        "one that is rounded once at the end. A Tensor Core multiplies halves and adds in fp32."
    )


CODE = {
    "PyTorch": """
total = torch.zeros((), dtype=torch.float16)
for x in values.half():
    total += x                                  # stops: 2048 + 1 == 2048

values.half().sum()                             # adds in fp32, rounds once
values.half().sum(dtype=torch.float32)          # and keeps the fp32 sum
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
""",
    "Paddle": """
values.astype("float16").sum()
values.astype("float32").sum()                  # add up in fp32
running = running.astype("float32") + loss.astype("float32")
""",
    "Keras": """
keras.ops.sum(keras.ops.cast(values, "float32"))           # cast before the sum
layer = keras.layers.LayerNormalization(dtype="float32")   # sums of squares in fp32
""",
}
LESSON = MeasuredLesson(
    id="accumulate",
    question="8,192 equal numbers are added one by one in fp16. Where does the sum end?",
    choices=("At the right sum, or close", "Below it: it stops growing", "At Inf"),
    answer=answer,
    draw=draw,
    settings={"term": Setting("Each number", {"1": "1", "0.1": "0.1", "0.01": "0.01"})},
    terms=("spacing", "half precision", "Tensor Core"),
    code=CODE,
    sources=(
        Source.PAPER,
        Source.HIGHAM,
        Source.NVIDIA,
        Source.NVIDIA_SHAPES,
        Source.TORCH_NUMERICS,
    ),
)
