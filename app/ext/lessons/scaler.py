"""Lesson 4: the dynamic scaler. torch's own, measured; others replayed over the same gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from ampscope.numerics.formats import FP16
from ampscope.records import Result
from ampscope.scalers.replay import POLICIES, Replay, ScalerSettings, StepGradients, replay
from ampscope.story.palette import DTYPES, MEASURE, NORMAL, OUTLINE
from app import chart, links
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import Trace, lines
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.lesson_runs import curve, reading
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import count, plural, power_of_two

SHOWN = {"torch": (MEASURE, "circle", "solid"), "paddle": (NORMAL, "square", "dash"),
         "keras": (DTYPES["e4m3"], "diamond", "dot")}  # fmt: skip
OWN = 0.0  # each framework's own first scale
FIRST_SCALES = (OWN, *(2.0**e for e in (0, 8, 13, 15, 16, 20, 24)))
INTERVALS = (10, 20, 50, 100)
EARLY = 10  # steps in which a scaler looks for its scale


def answer(results: Sequence[Result]) -> Answer:
    """How many of the first steps torch really skipped."""
    skips = curve(results, "skipped", "torch").y
    early, all_of_them = int(sum(skips[:EARLY])), int(sum(skips))
    choice = 0 if early == 0 else 1 if early < EARLY / 2 else 2
    return Answer(
        choice,
        f"GradScaler skipped {plural(early, 'step')} of the first {EARLY} and {all_of_them} of "
        f"{len(skips)} in all; the loss went from {_first(results):.3g} to {_last(results):.3g}.",
    )


def draw(results: Sequence[Result]) -> None:
    """Settings of the replay, the trajectories, what they say."""
    interval = int(reading(results, "growth interval", "torch"))
    first = links.slide("First scale (replayed)", "first4", FIRST_SCALES, default=OWN,
                        format_func=_scale_name)  # fmt: skip
    wanted = links.slide("Growth interval (replayed)", "interval4", INTERVALS, default=interval)
    made = {name: _replayed(results, name, first, wanted) for name in SHOWN}
    skips = curve(results, "skipped", "torch").y
    chart.key_figures(
        [
            KeyFigure("PyTorch skipped", count(int(sum(skips))), "Measured, with a first scale of "
                      f"2^16 and a growth interval of {interval}."),
            *(KeyFigure(f"{POLICIES[n].title.split()[0]} would skip", count(made[n].skips),
                        POLICIES[n].words) for n in SHOWN),
        ]
    )  # fmt: skip
    measured = curve(results, "scale", "torch")
    figure = lines(
        [
            Trace("PyTorch, measured", measured.x, [math.log2(s) for s in measured.y], OUTLINE,
                 dash="dot", is_stepped=True, has_markers=False),
            *(_line(name, made[name]) for name in SHOWN),
        ],
        x_title="step", y_title="loss scale", y_power=True,
    )  # fmt: skip
    lesson_page.show_chart(figure, "lesson-scaler", table(results, made), words(results, made))


def words(results: Sequence[Result], made: dict[str, Replay]) -> str:
    """Where skips lie, and how far the replay is certain."""
    skips = [i for i, skipped in enumerate(curve(results, "skipped", "torch").y) if skipped]
    early = sum(i < EARLY for i in skips)
    text = (
        f"Measured: {plural(len(skips), 'skip')}, {early} of them in the first {EARLY} steps; each "
        "halves the scale, and the weights stay as they were."
    )
    guess = [r.first_guess for r in made.values() if r.first_guess is not None]
    if guess:
        text += f" From step {min(guess)} on, the replay is an estimate."
    return text


def table(results: Sequence[Result], made: dict[str, Replay]) -> pd.DataFrame:
    """Every step of every trajectory."""
    measured, skipped = (curve(results, name, "torch") for name in ("scale", "skipped"))
    columns: dict[str, list[float]] = {
        "step": list(measured.x),
        "PyTorch, measured": list(measured.y),
        "skipped": list(skipped.y),
    }
    for name, one in made.items():
        columns[f"{POLICIES[name].title}, replayed"] = [step.scale for step in one.steps]
    return pd.DataFrame(columns)


def _scale_name(scale: float) -> str:
    return power_of_two(scale) if scale else "each one's own"


def _replayed(results: Sequence[Result], name: str, first: float, interval: int) -> Replay:
    tops, scales, skips = (curve(results, n, "torch").y for n in ("top", "scale", "skipped"))
    parts = enumerate(zip(tops, scales, skips, strict=True))
    gradients = [
        StepGradients(i, scale, bool(skip), None if math.isnan(top) else int(top),
                      FP16.max_exponent, has_histogram=not skip)
        for i, (top, scale, skip) in parts
    ]  # fmt: skip
    policy = POLICIES[name]
    settings = ScalerSettings(first or policy.defaults.initial_scale, interval)
    return replay(gradients, policy, settings)


def _line(name: str, made: Replay) -> Trace:
    color, symbol, dash = SHOWN[name]
    drawn = [s for s in made.steps if 0 < s.scale < math.inf]
    return Trace(f"{POLICIES[name].title}, replayed", [s.step for s in drawn],
                [math.log2(s.scale) for s in drawn], color, symbol, dash, is_stepped=True,
                has_markers=False)  # fmt: skip


def _first(results: Sequence[Result]) -> float:
    return curve(results, "loss", "torch").y[0]


def _last(results: Sequence[Result]) -> float:
    losses = curve(results, "loss", "torch").y
    return sum(losses[-10:]) / 10


CODE = {
    "PyTorch": """
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=2000)
scaler.scale(loss).backward()
scaler.step(optimizer)                          # left out when a gradient is Inf or NaN
scaler.update()                                 # × 0.5 after a skip, × 2 after 2000 good steps
print(scaler.get_scale())
""",
    "Paddle": """
scaler = paddle.amp.GradScaler(
    init_loss_scaling=2.0**16, incr_every_n_steps=2000, decr_every_n_nan_or_inf=1
)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    "Keras": """
optimizer = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.SGD(0.1), initial_scale=2.0**15, dynamic_growth_steps=2000
)
""",
}
LESSON = MeasuredLesson(
    id="scaler",
    question="A scaler starts at 65,536. How many of the first 10 steps does it skip?",
    choices=("None: it was chosen well", "A few, as it looks for its scale", "Half or more: a bug"),
    answer=answer,
    draw=draw,
    settings={"loss": Setting("Loss", {"sum": "summed over the batch", "mean": "its mean"})},
    terms=("loss scale", "scaler", "skipped step", "overflow"),
    code_note="This lesson measures with a growth interval of 20, so that growth is seen too.",
    code=CODE,
    sources=(Source.TORCH_AMP, Source.PADDLE, Source.KERAS, Source.PAPER),
)
