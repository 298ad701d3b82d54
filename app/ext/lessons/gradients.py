"""Lesson 2: where gradients live. One histogram a role against each format's zones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ampscope.numerics.formats import FORMATS
from ampscope.numerics.histogram import (
    Raw,
    Zones,
    max_exponent,
    median_exponent,
    min_exponent,
    quantile_exponent,
    zones,
)
from ampscope.records import Histogram, Result
from app import chart, links
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.figures.exponents import exponent_bars
from app.text import count, percent

FORMAT_NAMES = ("fp16", "bf16", "e4m3", "e5m2", "fp32")
GRADIENTS, WEIGHTS = "output gradients", "weights"
MANY = 20  # powers of two between the ends of the middle part
# The ends of the middle 98 %: the smallest of a million numbers says little about the others.
LOW, HIGH = 0.01, 0.99


def answer(results: Sequence[Result]) -> Answer:
    """By the powers of two that hold all but the smallest and the largest hundredth."""
    row = _row(results, GRADIENTS)
    low, high = quantile_exponent(row, LOW), quantile_exponent(row, HIGH)
    if low is None or high is None:
        return Answer(0, "All output gradients of this step are zero.")
    spread = high - low
    choice = 0 if spread <= MANY // 2 else 1 if spread <= MANY else 2
    return Answer(
        choice,
        f"98 % of them lie between 2^{low} and 2^{high + 1}, over {spread} powers of two; half "
        f"lie below 2^{(median_exponent(row) or 0) + 1}. The extremes are 2^{min_exponent(row)} "
        f"and 2^{max_exponent(row)}.",
    )


def draw(results: Sequence[Result]) -> None:
    """Role and format, the histogram, every format in one table."""
    roles = [r.name for r in results if isinstance(r, Histogram)]
    role = links.pick("Numbers of one step", "role2", roles, default=GRADIENTS)
    name = links.pick("Format", "format2", FORMAT_NAMES, default="fp16")
    row, fmt = _row(results, role), FORMATS[name]
    found = zones(row, fmt)
    chart.key_figures(
        [
            KeyFigure("Lost", percent(found.lost / max(found.nonzero, 1)), "They become zero."),
            KeyFigure("Subnormal", percent(found.subnormal / max(found.nonzero, 1)),
                      "They keep fewer digits."),
            KeyFigure("Overflow", percent(found.overflow / max(found.nonzero, 1)),
                      "They become infinite."),
            KeyFigure("Zero in both", count(found.zero), "Zero in fp32: not in the shares."),
        ]
    )  # fmt: skip
    figure = exponent_bars(row, fmt, 0, x_title=f"size of {role}, as fp32 has them")
    lesson_page.show_chart(figure, "lesson-gradients", table(results),
                           fit_words(role, name, found))  # fmt: skip
    chart.see(apart_words(results))


def fit_words(role: str, name: str, found: Zones) -> str:
    """What one format would keep of one role."""
    whole = max(found.nonzero, 1)
    if found.lost == found.overflow == 0:
        return f"Of {count(found.nonzero)} {role}, {name} loses none and overflows at none."
    return (
        f"Of {count(found.nonzero)} {role} that are not zero, {name} would lose "
        f"{percent(found.lost / whole)}, keep {percent(found.subnormal / whole)} with fewer "
        f"digits, and overflow at {percent(found.overflow / whole)}."
    )


def apart_words(results: Sequence[Result]) -> str:
    """Weights compared with gradients, by their medians."""
    weight, gradient = (median_exponent(_row(results, r)) for r in (WEIGHTS, GRADIENTS))
    if weight is None or gradient is None:
        return "All gradients are zero."
    return (
        f"The median weight lies near 2^{weight}, the median output gradient near 2^{gradient}: "
        f"one format must hold both, {abs(weight - gradient)} powers of two apart."
    )


def table(results: Sequence[Result]) -> pd.DataFrame:
    """Every role in every format."""
    rows = []
    for one in (r for r in results if isinstance(r, Histogram)):
        for name in FORMAT_NAMES:
            found = zones(np.array(one.row, np.int64), FORMATS[name])
            rows.append(
                {
                    "numbers": one.name,
                    "format": name,
                    "lost": found.lost,
                    "subnormal": found.subnormal,
                    "normal": found.normal,
                    "overflow": found.overflow,
                    "zero in both": found.zero,
                }
            )
    return pd.DataFrame(rows)


def _row(results: Sequence[Result], role: str) -> Raw:
    found = next(r for r in results if isinstance(r, Histogram) and r.name == role)
    return np.array(found.row, np.int64)


CODE = {
    "PyTorch": """
def count(gradient):                            # on any module's output
    exponents = torch.frexp(gradient.float()).exponent - 1
    print(torch.unique(exponents, return_counts=True))

layer.register_forward_hook(lambda module, inputs, output: output.register_hook(count))
""",
    "Paddle": """
def count(gradient):
    size = gradient.astype("float32").abs()
    exponents = paddle.floor(paddle.log2(size[size > 0]))
    print(paddle.unique(exponents, return_counts=True))

layer.register_forward_post_hook(lambda module, inputs, output: output.register_hook(count))
""",
    "Keras": """
with tf.GradientTape() as tape:                 # TensorFlow backend
    loss = loss_fn(targets, model(inputs))
for gradient in tape.gradient(loss, model.trainable_variables):
    size = tf.abs(gradient)
    exponents = tf.floor(tf.experimental.numpy.log2(size[size > 0]))
    print(tf.unique_with_counts(exponents))
""",
}
LESSON = MeasuredLesson(
    id="gradients",
    question="Over how many powers of two do 98 % of one step's output gradients spread?",
    choices=("At most 10", "From 11 to 20", "More than 20"),
    answer=answer,
    draw=draw,
    settings={"model": Setting("Model", {"gpt": "GPT", "lenet": "LeNet", "resnet": "ResNet"})},
    terms=("gradient", "activation", "exponent", "subnormal", "lost"),
    code=CODE,
    sources=(Source.PAPER, Source.BFLOAT16, Source.OCP_FP8, Source.NVIDIA),
)
