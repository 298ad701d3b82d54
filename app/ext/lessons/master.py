"""Lesson 7: master weights. Steps of every size on real weights, and a training that lags."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.records import Curve, Result
from ampscope.story.palette import DTYPES, NORMAL
from app import chart, links
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import SYMBOLS, Trace, lines
from app.ext.lessons.lesson_page import MeasuredLesson
from app.ext.lessons.lesson_runs import curve, curves, curves_table, reading
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import count, number, percent

HALF, MASTER = "bf16", "bf16 with fp32 master weights"
ASKED = -10  # the question's step: about a thousandth of a weight
TAIL = 20  # steps whose mean loss is compared


def answer(results: Sequence[Result]) -> Answer:
    """By the share of bf16 weights that a step of a thousandth leaves unchanged."""
    shares = {c.series: _at(c, ASKED) for c in curves(results, "unchanged")}
    share = shares[HALF]
    choice = 0 if share < 0.1 else 1 if share < 0.9 else 2
    return Answer(
        choice,
        f"A step of 2^{ASKED} of its weight leaves {percent(share)} of the weights unchanged in "
        f"bf16, {percent(shares['fp16'])} in fp16, {percent(shares['fp32'])} in fp32.",
    )


def draw(results: Sequence[Result]) -> None:
    """Slider, shares over step sizes, and the training."""
    all_of_them = curves(results, "unchanged")
    size = links.slide("Step, as a part of the weight", "step7", all_of_them[0].x,
                       default=float(ASKED), format_func=lambda e: f"2^{e:.0f}")  # fmt: skip
    shown = ("fp32", "fp16", "bf16", "e4m3")
    chart.key_figures(
        [
            KeyFigure(f"Unchanged in {n}", percent(_at(curve(results, "unchanged", n), size)))
            for n in shown
        ]
    )
    figure = lines(
        [Trace(c.series, c.x, c.y, DTYPES[c.series], SYMBOLS[c.series]) for c in all_of_them],
        x_title="step, as a part of the weight", y_title="weights with w + Δ == w", x_power=True,
        y_percent=True, mark=size,
    )  # fmt: skip
    lesson_page.show_chart(
        figure, "lesson-master", curves_table(all_of_them, "2^x of the weight"), ends_words(results)
    )
    looks = {"fp32": (DTYPES["fp32"], "solid"), HALF: (DTYPES["bf16"], "solid"),
             MASTER: (NORMAL, "dash")}  # fmt: skip
    losses = curves(results, "loss")
    figure = lines(
        [Trace(c.series, c.x, c.y, looks[c.series][0], dash=looks[c.series][1], has_markers=False)
         for c in losses],
        x_title="step", y_title="loss",
    )  # fmt: skip
    lesson_page.show_chart(
        figure, "lesson-master-loss", curves_table(losses, "step"), training_words(results)
    )


def ends_words(results: Sequence[Result]) -> str:
    """The largest step that still changes nothing, by format."""
    parts = []
    for one in curves(results, "unchanged"):
        lost = [x for x, share in zip(one.x, one.y, strict=True) if share == 1]
        parts.append(f"{one.series} 2^{max(lost):.0f}" if lost else f"{one.series} none here")
    weights = count(int(reading(results, "weights", "LeNet")))
    return (
        f"w + Δ == w for every one of {weights} weights of a LeNet up to a step of: "
        f"{', '.join(parts)} of the weight."
    )


def training_words(results: Sequence[Result]) -> str:
    """Where each training ends, and how many weights moved."""
    parts = []
    for one in curves(results, "loss"):
        loss, moved = sum(one.y[-TAIL:]) / TAIL, reading(results, "moved", one.series)
        parts.append(f"{one.series} {number(loss)} ({percent(moved)} of the weights move per step)")
    return f"The same training with small steps; mean loss at its end: {', '.join(parts)}."


def _at(one: Curve, x: float) -> float:
    return one.y[one.x.index(float(x))]


CODE = {
    "PyTorch": """
# Autocast leaves the weights in fp32: they are the master weights.
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = loss_fn(model(inputs), targets)
loss.backward()
optimizer.step()                                # w + Δ in fp32

model.to(torch.bfloat16)                        # no master weights: small steps are lost
""",
    "Paddle": """
model, optimizer = paddle.amp.decorate(
    model, optimizer, level="O2", dtype="bfloat16", master_weight=True
)
with paddle.amp.auto_cast(level="O2", dtype="bfloat16"):
    loss = loss_fn(model(inputs), targets)
""",
    "Keras": """
policy = keras.DTypePolicy("mixed_bfloat16")
policy.compute_dtype, policy.variable_dtype     # bfloat16, float32: the master weights
keras.config.set_dtype_policy(policy)
""",
}
LESSON = MeasuredLesson(
    id="master",
    question="Every weight takes a step of a thousandth of itself. In bf16, how many do not move?",
    choices=("Hardly any", "About half of them", "Nearly all of them"),
    answer=answer,
    draw=draw,
    terms=("master weights", "spacing", "lost", "half precision"),
    code=CODE,
    sources=(Source.PAPER, Source.BFLOAT16, Source.PADDLE, Source.KERAS),
)
