"""Lesson 3: underflow and loss scaling. One histogram that a slider moves, and what fp16 really did
at each of its positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ampscope.numerics.formats import FP16
from ampscope.numerics.histogram import ABOVE, EXPONENTS
from ampscope.records import Histogram, Result, UnderflowCounts
from ampscope.story.palette import LOST, NONFINITE, SUBNORMAL
from app import chart, links
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import Trace, lines
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.figures.exponents import exponent_bars
from app.text import count, percent, power, power_of_two

FEW, MOST = 0.01, 0.5  # shares of the question's choices
STATIC = (2.0**13, 2.0**16)  # a scale that older guides fix, and GradScaler's first


def answer(results: Sequence[Result]) -> Answer:
    """By the share that is lost without scaling."""
    plain = _underflow_counts(results)[0]
    share = _lost_share(plain)
    choice = 0 if share < FEW else 1 if share < MOST else 2
    text = f"At loss scale 1, {percent(share)} of the gradients that were not zero became zero."
    return Answer(choice, text)


def draw(results: Sequence[Result]) -> None:
    """Slider, histogram, three counts, and the whole range in one chart."""
    counts = _underflow_counts(results)
    row = next(np.array(r.row, np.int64) for r in results if isinstance(r, Histogram))
    wanted = links.slide(
        "Loss scale", "scale3", [f.scale for f in counts], default=1.0, format_func=power_of_two
    )
    here = next(f for f in counts if f.scale == wanted)
    chart.key_figures(_figures(here))
    shift = int(math.log2(wanted))
    figure = exponent_bars(row, FP16, shift, x_title=f"gradient × {power(math.log2(wanted))}")
    lesson_page.show_chart(
        figure,
        "lesson-underflow-exponents",
        _histogram_table(row, shift),
        at_scale(here),
        f"Bars: how many gradients lie in each power of two at loss scale {power_of_two(wanted)}. "
        "Left of 2^-25 they are lost in fp16, up to 2^-14 subnormal, beyond 65,504 infinite.",
    )
    exponents = [math.log2(f.scale) for f in counts]
    shown = lines(
        [
            Trace("lost", exponents, [_lost_share(f) for f in counts], LOST),
            Trace("subnormal", exponents, [f.subnormal / _nonzero(f) for f in counts], SUBNORMAL,
                 "square"),
            Trace("NaN or Inf", exponents, [f.nonfinite / _nonzero(f) for f in counts], NONFINITE,
                 "x"),
        ],
        x_title="loss scale", y_title="share of gradients", x_power=True, y_percent=True,
        mark=shift,
    )  # fmt: skip
    lesson_page.show_chart(shown, "lesson-underflow-scales", table(counts), window_words(counts))


def at_scale(at: UnderflowCounts) -> str:
    """What fp16 did at one scale, in a sentence."""
    scale = power_of_two(at.scale)
    if at.nonfinite:
        return (
            f"At {scale} the largest gradients became Inf, and spread: {count(at.nonfinite)} of "
            f"{count(at.total)} hold Inf or NaN. The scaler would skip this step."
        )
    return (
        f"At {scale}, {count(at.lost)} gradients are lost, {count(at.subnormal)} keep fewer "
        f"digits, and {count(at.zero_before)} were zero in fp32 as well: they are no loss."
    )


def window_words(counts: Sequence[UnderflowCounts]) -> str:
    """Which scales are safe, and whether the usual two are among them."""
    good = [f.scale for f in counts if not f.nonfinite and _lost_share(f) < FEW]
    if not good:
        return "No scale here keeps all but 1 % of the gradients without overflow."
    low, high = min(good), max(good)
    usual = " and ".join(
        f"{s:,.0f} ({'inside' if low <= s <= high else 'too low' if s < low else 'too high'})"
        for s in STATIC
    )
    over = next((f.scale for f in counts if f.nonfinite), None)
    beyond = f"; at {power_of_two(over)} they overflow" if over else ""
    return (
        f"From {power_of_two(low)} to {power_of_two(high)} under 1 % of these gradients are lost"
        f"{beyond}. The usual scales: {usual}."
    )


def table(counts: Sequence[UnderflowCounts]) -> pd.DataFrame:
    """The counts of every scale."""
    return pd.DataFrame(
        {
            "loss scale": [power_of_two(f.scale) for f in counts],
            "lost": [f.lost for f in counts],
            "subnormal": [f.subnormal for f in counts],
            "zero in both": [f.zero_before for f in counts],
            "NaN or Inf": [f.nonfinite for f in counts],
            "of": [f.total for f in counts],
        }
    )


def _figures(here: UnderflowCounts) -> list[KeyFigure]:
    whole = _nonzero(here)
    return [
        KeyFigure("Lost", percent(here.lost / whole), "Zero in fp16, not zero in fp32."),
        KeyFigure("Subnormal", percent(here.subnormal / whole), "Kept with fewer digits."),
        KeyFigure("NaN or Inf", percent(here.nonfinite / whole), "Too large, or made of such."),
        KeyFigure("Zero in both", count(here.zero_before), "Zero in fp32 too: not counted above."),
    ]


def _histogram_table(row: np.ndarray[tuple[int], np.dtype[np.int64]], shift: int) -> pd.DataFrame:
    kept = [i for i in range(ABOVE + 1) if row[i]]
    return pd.DataFrame(
        {
            "power of two": [f"2^{int(EXPONENTS[i]) + shift}" for i in kept],
            "gradients": [int(row[i]) for i in kept],
        }
    )


def _underflow_counts(results: Sequence[Result]) -> list[UnderflowCounts]:
    return sorted((r for r in results if isinstance(r, UnderflowCounts)), key=lambda f: f.scale)


def _nonzero(counts: UnderflowCounts) -> int:
    return max(counts.total - counts.zero_before, 1)


def _lost_share(counts: UnderflowCounts) -> float:
    return counts.lost / _nonzero(counts)


CODE = {
    "PyTorch": """
scaler = torch.amp.GradScaler("cuda")           # starts at 65536

with torch.autocast("cuda", dtype=torch.float16):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()                   # every gradient is 65536 times as large
scaler.step(optimizer)                          # divides it out; skips Inf and NaN
scaler.update()                                 # halves the scale after a skip
""",
    "Paddle": """
scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**16)

with paddle.amp.auto_cast(dtype="float16"):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
optimizer.clear_grad()
""",
    "Keras": """
keras.mixed_precision.set_global_policy("mixed_float16")
model.compile(optimizer="adam", loss=loss_fn)   # wrapped in a LossScaleOptimizer by compile
model.fit(inputs, targets)
""",
}
LESSON = MeasuredLesson(
    id="underflow",
    question="A model's gradients flow in fp16 without loss scaling. How many become zero?",
    choices=("Hardly any: under 1 %", "Some: from 1 % to half", "Most of them: over half"),
    answer=answer,
    draw=draw,
    settings={
        "model": Setting("Model", {"gpt": "GPT", "lenet": "LeNet"}),
        "loss": Setting(
            "Loss",
            {"small": "small (÷ 2,048)", "usual": "usual"},
            "Small: the loss is divided by 2,048, as a mean over very many numbers is.",
        ),
    },
    terms=("gradient", "underflow", "subnormal", "lost", "loss scale"),
    code=CODE,
    sources=(Source.PAPER, Source.TORCH_EXAMPLES, Source.NVIDIA, Source.PADDLE),
)
