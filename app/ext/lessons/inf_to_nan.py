"""Lesson 9: how one Inf becomes NaN. The chain of a step, and what is left after it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from ampscope.records import NonFiniteCounts, Result
from ampscope.story.palette import NONFINITE, NORMAL, OVERFLOW
from app import chart, links
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import Bars, stacked_bars
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.lesson_runs import reading
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import count, number, power_of_two

BAD_STEP, LAST_STEP = 1, 3
HEIGHT_PX = 420


def answer(results: Sequence[Result]) -> Answer:
    """By the weights and the loss after the last step."""
    last = next(t for t in _counts_at(results, LAST_STEP) if t.place == "weights")
    loss = reading(results, "loss", str(LAST_STEP))
    is_dead, is_well = last.nan + last.inf > 0, loss == loss and loss not in (float("inf"),)
    choice = 2 if is_dead else 0 if is_well else 1
    return Answer(
        choice,
        f"After step {LAST_STEP}, {count(last.nan)} of {count(last.total)} weights are NaN, and "
        f"its loss is {number(loss)}.",
    )


def draw(results: Sequence[Result]) -> None:
    """Step picker, the chain as bars, the sentence of each link that changes something."""
    step = links.pick("Step", "step9", (0, 1, 2, 3), default=BAD_STEP, format_func=_step_name)
    counts = _counts_at(results, step)
    chart.key_figures(
        [
            KeyFigure("Loss", number(reading(results, "loss", str(step)))),
            KeyFigure("Weights moved", "yes" if reading(results, "moved", str(step)) else "no",
                      "Whether the optimizer changed any weight in this step."),
            KeyFigure("Loss scale", power_of_two(reading(results, "scale", str(step))),
                      "1 without a scaler."),
            KeyFigure("NaN weights after it", count(counts[-1].nan)),
        ]
    )  # fmt: skip
    lesson_page.show_chart(chain(counts), "lesson-inf-to-nan", table(results), chain_words(counts))
    chart.see(end_words(results))


def chain_words(counts: Sequence[NonFiniteCounts]) -> str:
    """The first Inf, the first NaN, and how far they got."""
    inf = next((t for t in counts if t.inf), None)
    nan = next((t for t in counts if t.nan), None)
    if inf is None and nan is None:
        return "Every number of this step is finite."
    parts = []
    if inf is not None:
        parts.append(
            f"{inf.place} is the first with Inf ({count(inf.inf)} of {count(inf.total)}; its "
            f"largest finite number is {number(inf.largest)}, and fp16 ends at 65,504)"
        )
    if nan is not None:
        parts.append(
            f"{nan.place} is the first with NaN ({count(nan.nan)} of {count(nan.total)})"
            + ("; it adds up infinities of both signs" if inf is not None else "")
        )
    last = counts[-1]
    return _sentence(". ".join(parts)) + f" Weights that are NaN then: {count(last.nan)}."


def end_words(results: Sequence[Result]) -> str:
    """What each step left behind."""
    parts = []
    for step in range(LAST_STEP + 1):
        weights = next(t for t in _counts_at(results, step) if t.place == "weights")
        moved = "moved" if reading(results, "moved", str(step)) else "left alone"
        parts.append(f"step {step}: loss {number(reading(results, 'loss', str(step)))}, weights "
                     f"{moved}, {count(weights.nan)} NaN")  # fmt: skip
    return _sentence("; ".join(parts))


def chain(counts: Sequence[NonFiniteCounts]) -> go.Figure:
    """A bar per place: finite, Inf, NaN, each with its own pattern."""
    places = [t.place for t in counts]
    kinds = (
        ("finite", [t.total - t.nan - t.inf for t in counts], NORMAL, ""),
        ("Inf", [t.inf for t in counts], OVERFLOW, "/"),
        ("NaN", [t.nan for t in counts], NONFINITE, "x"),
    )
    parts = [
        Bars(
            name, [n / t.total for n, t in zip(numbers, counts, strict=True)], color, pattern,
            [f"{count(n)} of {count(t.total)} {name}"
             for n, t in zip(numbers, counts, strict=True)],
        )
        for name, numbers, color, pattern in kinds
    ]  # fmt: skip
    return stacked_bars(
        places, parts, x_title="share of its numbers", height=HEIGHT_PX, x_percent=True
    )


def table(results: Sequence[Result]) -> pd.DataFrame:
    """Every place of every step."""
    return pd.DataFrame(
        [
            {"step": t.step, "place": t.place, "numbers": t.total, "Inf": t.inf, "NaN": t.nan,
             "largest finite": t.largest}
            for t in results
            if isinstance(t, NonFiniteCounts)
        ]
    )  # fmt: skip


def _counts_at(results: Sequence[Result], step: int) -> list[NonFiniteCounts]:
    return [t for t in results if isinstance(t, NonFiniteCounts) and t.step == step]


def _sentence(text: str) -> str:
    """capitalize() would write nan for NaN."""
    return f"{text[:1].upper()}{text[1:]}."


def _step_name(step: int) -> str:
    return f"{step}, the bad batch" if step == BAD_STEP else str(step)


CODE = {
    "PyTorch": """
scaler.scale(loss).backward()
scaler.step(optimizer)                          # leaves the weights alone when one gradient is NaN
scaler.update()                                 # halves the scale

if not torch.isfinite(loss):                    # a batch that is bad every time: find it
    print(batch_index, inputs.abs().max())
""",
    "Paddle": """
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()

if not bool(paddle.isfinite(loss)):
    print(batch_index, float(inputs.abs().max()))
""",
    "Keras": """
keras.mixed_precision.set_global_policy("mixed_float16")   # LossScaleOptimizer skips the step
model.fit(inputs, targets, callbacks=[keras.callbacks.TerminateOnNaN()])
""",
}
LESSON = MeasuredLesson(
    id="inf_to_nan",
    question="One batch overflows in step 1. How does the model stand after step 3?",
    choices=("It learns on", "Its weights are well, but its loss is not", "Its weights are NaN"),
    answer=answer,
    draw=draw,
    settings={
        "scaler": Setting("GradScaler", {"without": "without", "with": "with"}),
        "batch": Setting("What overflows", {
            "one": "one batch", "every": "every batch from step 1 on"}),
    },
    terms=("Inf", "NaN", "overflow", "scaler", "skipped step"),
    code=CODE,
    sources=(Source.IEEE_754, Source.TORCH_AMP, Source.TORCH_EXAMPLES, Source.NVIDIA,
             Source.PADDLE),
)  # fmt: skip
