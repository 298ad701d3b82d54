"""Lesson 6: model.half(). The tutorial's training, and the same under autocast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pandas as pd
import plotly.graph_objects as go

from ampscope.ext.lessons.mistakes import HALF_LENET
from ampscope.records import Curve, Result
from ampscope.story.palette import DTYPES, MEASURE, NONFINITE, NORMAL
from app import chart
from app.chart import KeyFigure
from app.ext.lessons import lesson_diagnosis, lesson_page
from app.ext.lessons.figures import Trace, lines
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.lesson_runs import curve, curves, reading
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import count, for_plotly, number, percent

FP32, HALF, AMP = "fp32", "model.half()", "autocast + GradScaler"
PATCHED = "model.half(), eps=1e-4"
LEARNS = 0.8  # of the fall of fp32's loss: from there on a training learns like it
STYLES = {FP32: (DTYPES["fp32"], "circle", "solid"), HALF: (DTYPES["fp16"], "x", "solid"),
         AMP: (NORMAL, "square", "dash")}  # fmt: skip
PATCHED_STYLE = (MEASURE, "diamond", "dot")


def answer(results: Sequence[Result]) -> Answer:
    """NaN, or weights that do not move, or neither: as measured."""
    losses, half, full = curve(results, "loss", HALF), _share(results, HALF), _share(results, FP32)
    bad = next((step for step, loss in enumerate(losses.y) if not math.isfinite(loss)), None)
    if bad is not None:
        return Answer(2, f"With model.half() the loss is NaN from step {bad} on.")
    fp32 = curve(results, "loss", FP32).y
    text = (
        f"In the first step {percent(half)} of the weights with a gradient moved, in fp32 "
        f"{percent(full)}. The loss went from {number(losses.y[0])} to {number(losses.y[-1])}, in "
        f"fp32 to {number(fp32[-1])}. Steps that are smaller beside their weights move fewer still."
    )
    learns = losses.y[0] - losses.y[-1] >= LEARNS * (fp32[0] - fp32[-1])
    return Answer(0 if learns else 1, text)


def draw(results: Sequence[Result]) -> None:
    """Losses, weights that move, and the numbers behind."""
    chart.key_figures(_figures(results))
    losses = curves(results, "loss")
    figure = lines([_line(c) for c in losses], x_title="step", y_title="loss")
    _mark_nan(figure, losses)
    lesson_page.show_chart(figure, "lesson-half-loss", table(results), loss_words(results))
    if any(one.series == PATCHED for one in losses):
        chart.see(cause_words(results))
    else:
        _moved(results)
    chart.see(norm_words(results))


def _moved(results: Sequence[Result]) -> None:
    found = curves(results, "moved")
    shares = [_line(c, _shares(results, c.series)) for c in found]
    figure = lines.fresh(shares, x_title="step", y_title="weights that moved", y_percent=True)
    figure.update_yaxes(range=[-0.03, 1.05])
    lesson_page.show_chart(figure, "lesson-half-moved", table(results), moved_words(results))


def _mark_nan(figure: go.Figure, losses: Sequence[Curve]) -> None:
    """A curve that ends says why."""
    for one in losses:
        bad = next((i for i, loss in enumerate(one.y) if not math.isfinite(loss)), None)
        if bad:
            figure.add_annotation(
                x=one.x[bad - 1], y=one.y[bad - 1], ax=60, ay=140, arrowcolor=NONFINITE,
                text=f"<b>{for_plotly(one.series)}: NaN from step {bad}</b>",
            )  # fmt: skip


def loss_words(results: Sequence[Result]) -> str:
    """Where each way ends, and how well it then reads digits."""
    parts = []
    for one in curves(results, "loss"):
        accuracy = reading(results, "accuracy", one.series)
        parts.append(f"{one.series} {number(one.y[-1])} ({percent(accuracy)} right)")
    return f"Loss after {len(one.y)} steps, and digits read right: {', '.join(parts)}."


def cause_words(results: Sequence[Result]) -> str:
    """Adam's arithmetic where Adam trained."""
    eps, larger = (reading(results, n, "fp16") for n in ("eps", "eps, larger"))
    zero, of, infinite, nan = (
        count(int(reading(results, n, HALF)))
        for n in ("squares that are zero", "gradients", "infinite weights", "NaN weights")
    )
    return (
        f"Adam divides the mean gradient m by √v + eps. In fp16 eps=1e-8 is {number(eps)}, and v, "
        f"a thousandth of the squared gradient in the first step, is zero for {zero} of {of} "
        f"gradients that are not. m / 0 is Inf: after one step {infinite} weights are infinite, "
        f"and {nan} are NaN, from 0 / 0 where the gradient is zero too. eps=1e-4 is "
        f"{number(larger)} in fp16, which ends both; but where v is zero its steps are not Adam's "
        "any more, and the weights still are fp16."
    )


def moved_words(results: Sequence[Result]) -> str:
    """Shares in the first step."""
    names = [one.series for one in curves(results, "moved")]
    parts = [f"{name} {percent(_share(results, name))}" for name in names]
    return f"Weights with a gradient that moved in the first step: {', '.join(parts)}."


def norm_words(results: Sequence[Result]) -> str:
    """BatchNorm's running variance."""
    half, full = (curve(results, "running variance", name) for name in (HALF, FP32))
    bad = next((i for i, value in enumerate(half.y) if not math.isfinite(value)), None)
    if bad is None:
        return "BatchNorm's running variance stayed finite in fp16 here."
    return (
        f"BatchNorm after model.half(): fed numbers with a standard deviation of "
        f"{half.x[bad]:,.0f}, its running variance is {number(half.y[bad])} in fp16 and "
        f"{full.y[bad]:,.0f} in fp32. Evaluation divides by it, and puts out zeros."
    )


def table(results: Sequence[Result]) -> pd.DataFrame:
    """Every curve over the steps."""
    found = [c for name in ("loss", "moved", "with a gradient") for c in curves(results, name)]
    columns = {"step": list(range(len(found[0].y)))}
    return pd.DataFrame(columns | {f"{c.name}, {c.series}": list(c.y) for c in found})


def _figures(results: Sequence[Result]) -> list[KeyFigure]:
    half = curve(results, "loss", HALF)
    bad = next((f"step {i}" for i, loss in enumerate(half.y) if not math.isfinite(loss)), "never")
    return [
        KeyFigure("model.half(): NaN from", bad),
        KeyFigure(
            "It moves",
            percent(_share(results, HALF)),
            "Weights with a gradient that the first step moves to another number.",
        ),
        KeyFigure("fp32 moves", percent(_share(results, FP32)), "Weights in the first step."),
        KeyFigure("autocast moves", percent(_share(results, AMP)), "Weights in the first step."),
    ]


def _line(one: Curve, y: Sequence[float] | None = None) -> Trace:
    color, symbol, dash = STYLES.get(one.series, PATCHED_STYLE)
    shown = [v if math.isfinite(v) else math.nan for v in (one.y if y is None else y)]
    return Trace(one.series, one.x, shown, color, symbol, dash)


def _shares(results: Sequence[Result], series: str) -> list[float]:
    moved, of = (curve(results, name, series).y for name in ("moved", "with a gradient"))
    losses = curve(results, "loss", series).y
    parts = zip(moved, of, losses, strict=True)
    return [m / o if o and math.isfinite(loss) else math.nan for m, o, loss in parts]


def _share(results: Sequence[Result], series: str) -> float:
    return _shares(results, series)[0]


CODE = {
    "PyTorch": """
model.half()                                    # don't: weights, Adam's state, BatchNorm in fp16

scaler = torch.amp.GradScaler("cuda")           # do: leave the model in fp32
with torch.autocast("cuda", dtype=torch.float16):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    "Paddle": """
model.to(dtype="float16")                       # don't

# do: O2 keeps fp32 master weights; O1 leaves the model in fp32
model, optimizer = paddle.amp.decorate(model, optimizer, level="O2", master_weight=True)
with paddle.amp.auto_cast(level="O2", dtype="float16"):
    loss = loss_fn(model(inputs), targets)
""",
    "Keras": """
keras.config.set_floatx("float16")              # don't: variables become fp16

keras.mixed_precision.set_global_policy("mixed_float16")   # do: compute in fp16, keep fp32
""",
}
LESSON = MeasuredLesson(
    id="half",
    question="A tutorial's LeNet is turned into fp16 by model.half(), then trained. What happens?",
    choices=("It learns like in fp32", "Its weights hardly move", "Its loss becomes NaN"),
    answer=answer,
    draw=draw,
    settings={"optimizer": Setting("Optimizer", {"adam": "Adam", "sgd": "SGD"},
        "Adam with its default learning rate of 0.001, or SGD with momentum 0.9 and 0.01.")},
    terms=("half precision", "autocast", "scaler", "master weights", "eps"),
    code=CODE,
    sources=(Source.PAPER, Source.TORCH_AMP, Source.ADAM, Source.BATCH_NORM, Source.NVIDIA),
    after=partial(lesson_diagnosis.section, HALF_LENET),
)  # fmt: skip
