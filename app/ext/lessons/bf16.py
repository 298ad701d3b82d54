"""Lesson 8: bf16 or fp16. Range against precision, in errors and in losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import pandas as pd

from ampscope.records import Curve, Result
from ampscope.story.palette import DTYPES, NORMAL
from app import chart
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import Trace, lines
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.lesson_runs import curves, reading
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import percent

NAMES = {"fp32": "fp32", "bf16": "bf16", "fp16-noscaler": "fp16, no scaler",
         "fp16": "fp16 with a scaler"}  # fmt: skip
STYLES = {"fp32": (DTYPES["fp32"], "solid"), "bf16": (DTYPES["bf16"], "solid"),
         "fp16-noscaler": (DTYPES["fp16"], "dot"), "fp16": (NORMAL, "dash")}  # fmt: skip
ALIKE = 1.1  # times fp32's loss of the same seed, in the median: within, it learned as well


def answer(results: Sequence[Result]) -> Answer:
    """Which trainings learned as fp32 did, seed by seed."""
    fine = {name: median(ratios(results, name)) <= ALIKE for name in NAMES}
    parts = [
        f"{NAMES[name]} {median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        for name in list(NAMES)[1:]
        if (found := ratios(results, name))
    ]
    text = (
        f"Loss at the end, as a multiple of fp32's with the same seed, median and range of "
        f"{len(ratios(results, 'bf16'))} seeds: {', '.join(parts)}. A median of at most {ALIKE:g} "
        "counts as having learned as well."
    )
    if not fine["bf16"]:
        return Answer(2, text)
    return Answer(0 if fine["fp16-noscaler"] else 1, text)


def ratios(results: Sequence[Result], name: str) -> list[float]:
    """The end of each training over that of fp32 with the same seed; NaN counts as infinite."""
    ends = {c.series: c.y for c in curves(results, "end")}
    pairs = zip(ends[name], ends["fp32"], strict=True)
    return [end / fp32 if math.isfinite(end) else math.inf for end, fp32 in pairs]


def draw(results: Sequence[Result]) -> None:
    """Errors of one pass, losses of a training."""
    chart.key_figures(
        [
            KeyFigure("bf16: error", percent(reading(results, "median error", "bf16")),
                      "Median of the gradients that are kept, against fp32."),
            KeyFigure("fp16: error", percent(reading(results, "median error", "fp16")),
                      "The same, with a scaler."),
            KeyFigure("bf16: lost", percent(reading(results, "lost", "bf16")),
                      "Zero here and not in fp32."),
            KeyFigure("fp16, no scaler: lost",
                      percent(reading(results, "lost", "fp16-noscaler")), "The same."),
        ]
    )  # fmt: skip
    losses = curves(results, "loss")
    figure = lines([_line(c) for c in losses], x_title="step", y_title="loss", y_log=True)
    lesson_page.show_chart(figure, "lesson-bf16", table(results), error_words(results),
                           alt=answer(results).text)  # fmt: skip


def error_words(results: Sequence[Result]) -> str:
    """Precision and range in one sentence."""
    bf16, fp16 = (reading(results, "median error", name) for name in ("bf16", "fp16"))
    lost = reading(results, "lost", "fp16-noscaler")
    coarser = f"{bf16 / fp16:.1f} times" if fp16 else "many times"
    return (
        f"Precision: bf16's gradients are {coarser} as far off as fp16's. Range: without a scaler "
        f"fp16 loses {percent(lost)} of them, bf16 {percent(reading(results, 'lost', 'bf16'))}. "
        "Where few are lost, they cancelled or a ReLU switched otherwise: rounding, no underflow."
    )


def table(results: Sequence[Result]) -> pd.DataFrame:
    """The losses."""
    losses = curves(results, "loss")
    return pd.DataFrame({"step": list(losses[0].x)} | {NAMES[c.series]: list(c.y) for c in losses})


def _line(one: Curve) -> Trace:
    color, dash = STYLES[one.series]
    return Trace(NAMES[one.series], one.x, one.y, color, dash=dash, has_markers=False)


CODE = {
    "PyTorch": """
with torch.autocast("cuda", dtype=torch.bfloat16):          # bf16: no scaler
    loss = loss_fn(model(inputs), targets)
loss.backward()
optimizer.step()

with torch.autocast("cuda", dtype=torch.float16):           # fp16: with one
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    "Paddle": """
with paddle.amp.auto_cast(dtype="bfloat16"):                # bf16: no scaler
    loss = loss_fn(model(inputs), targets)
loss.backward()

scaler = paddle.amp.GradScaler()                            # fp16: with one
with paddle.amp.auto_cast(dtype="float16"):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
""",
    "Keras": """
keras.mixed_precision.set_global_policy("mixed_bfloat16")   # no loss scaling
keras.mixed_precision.set_global_policy("mixed_float16")    # compile adds it
""",
}
LESSON = MeasuredLesson(
    id="bf16",
    question="Without a loss scaler, which of the two learns as well as fp32 does here?",
    choices=("Both bf16 and fp16", "Only bf16", "Not even bf16"),
    answer=answer,
    draw=draw,
    settings={"loss": Setting("Loss", {"usual": "usual", "small": "small (× 2^-18)"},
        "Small: the loss is multiplied by 2^-18, and the optimizer makes up for it.")},
    terms=("half precision", "underflow", "scaler", "mantissa", "exponent"),
    code=CODE,
    sources=(Source.BFLOAT16, Source.TORCH_AMP, Source.NVIDIA, Source.PADDLE, Source.KERAS),
)  # fmt: skip
