"""Lesson 14: what it costs. Measured throughput, and the learner's own prices."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from ampscope.records import EnergyUse, Result, StepTimes
from ampscope.story.palette import dtype_color
from app import chart, links
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import Bars, stacked_bars
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.lesson_runs import warn
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import duration

GAINS = 1.1  # times as cheap, and more: beyond the spread of a step
JOULES_A_KWH = 3.6e6
# Where the URL says nothing. Assumptions, and said to be such on the page.
SAMPLES, WATTS, KWH_PRICE, HOUR_PRICE = 1_000_000, 100, 0.30, 0.0


def answer(results: Sequence[Result]) -> Answer:
    """By throughput: at equal power, cost goes with time."""
    speed = {t.precision: t.samples_s for t in _times(results)}
    ratio = speed["bf16"] / speed["fp32"]
    cost = 1 / ratio
    choice = 0 if cost <= 1 / GAINS else 1 if cost < GAINS else 2
    return Answer(
        choice,
        f"fp32 trains with {speed['fp32']:,.0f} samples per second here, bf16 with "
        f"{speed['bf16']:,.0f}: at the same power it costs {cost:.2f} times as much.",
    )


def draw(results: Sequence[Result]) -> None:
    """Prices to type in, and what a training costs."""
    left, right = st.columns(2)
    with left:
        samples = _number("Samples in all (data × epochs)", "samples14", SAMPLES, 1.0)
        watts = _number("Power of the machine, W", "watts14", WATTS, 1.0)
    with right:
        kwh = _number("Price of a kWh", "kwh14", KWH_PRICE, 0.0)
        hour = _number("Price of an hour of the machine", "hour14", HOUR_PRICE, 0.0)
    made = costs(results, samples, watts, kwh, hour)
    chart.key_figures(
        [
            figure
            for row in made
            for figure in (
                KeyFigure(f"{row['precision']}: time", duration(float(row["hours"]) * 3600)),
                KeyFigure(f"{row['precision']}: cost", f"{float(row['cost']):,.4g}",
                          "In the currency of the prices above."),
            )
        ][:4]
    )  # fmt: skip
    warn(results)
    text = words(results, made, watts)
    lesson_page.show_chart(bars(made), "lesson-cost", pd.DataFrame(made), text)


def costs(
    results: Sequence[Result], samples: float, watts: float, kwh: float, hour: float
) -> list[dict[str, float | str]]:
    """Hours, kWh and money, a row per precision. Energy is the counter's where there is one."""
    joules = {e.precision: e.joules / (e.steps * e.samples) for e in results
              if isinstance(e, EnergyUse)}  # fmt: skip
    rows: list[dict[str, float | str]] = []
    for times in _times(results):
        hours = samples / times.samples_s / 3600
        measured = joules.get(times.precision)
        energy = watts * hours / 1000 if measured is None else measured * samples / JOULES_A_KWH
        rows.append(
            {
                "precision": times.precision,
                "samples per second": times.samples_s,
                "hours": hours,
                "kWh": energy,
                "energy is": "assumed" if measured is None else "measured",
                "cost of energy": energy * kwh,
                "cost of time": hours * hour,
                "cost": energy * kwh + hours * hour,
            }
        )
    return rows


def words(results: Sequence[Result], made: Sequence[dict[str, float | str]], watts: float) -> str:
    """The two costs, and what of them is an assumption."""
    parts = [f"{r['precision']} {float(r['kWh']):.4g} kWh and {float(r['cost']):.4g}" for r in made]
    sources = {e.source for e in results if isinstance(e, EnergyUse)}
    basis = (
        f"The energy was read from {', '.join(sorted(sources))}."
        if sources
        else f"Throughput is measured; the {watts:g} W are an assumption, as no energy counter can "
        "be read here, and so are the prices."
    )
    return f"The whole training costs: {'; '.join(parts)}. {basis}"


def bars(made: Sequence[dict[str, float | str]]) -> go.Figure:
    """Cost of energy and of time, a bar per precision."""
    names = [str(r["precision"]) for r in made]
    colors = [dtype_color(name) for name in names]
    parts = [
        Bars(name, [float(r[name]) for r in made], colors, pattern)
        for name, pattern in (("cost of energy", ""), ("cost of time", "/"))
    ]
    return stacked_bars(names, parts, x_title="cost, in the currency of the prices", height=240)


def _number(label: str, name: str, default: float, least: float) -> float:
    """A number that lives in the URL; what cannot be read is the default."""
    try:
        value = float(links.wanted(name))
    except ValueError:
        value = float(default)
    value = min(max(value, least), 1e15) if value == value else float(default)
    key = links.widget_key(name, value)
    st.number_input(label, float(least), 1e15, value, key=key, on_change=_keep, args=(name, key),
                    format="%g")  # fmt: skip
    return value


def _keep(name: str, key: str) -> None:
    links.keep(name, f"{st.session_state[key]:g}")


def _times(results: Sequence[Result]) -> list[StepTimes]:
    return [r for r in results if isinstance(r, StepTimes)]


CODE = {
    "PyTorch": """
torch.cuda.synchronize()
begin = time.perf_counter()
for _ in range(100):
    train_step()
torch.cuda.synchronize()                        # without it only the launches are timed
samples_s = 100 * batch_size / (time.perf_counter() - begin)
""",
    "Paddle": """
paddle.device.synchronize()
begin = time.perf_counter()
for _ in range(100):
    train_step()
paddle.device.synchronize()
samples_s = 100 * batch_size / (time.perf_counter() - begin)
""",
    "Keras": """
begin = time.perf_counter()
model.fit(dataset, epochs=1)
samples_s = number_of_samples / (time.perf_counter() - begin)
""",
}
LESSON = MeasuredLesson(
    id="cost",
    question="A training moves from fp32 to bf16 on this machine. What becomes of its cost?",
    choices=(
        "It falls by a tenth or more",
        "It stays about the same",
        "It rises by a tenth or more",
    ),
    answer=answer,
    draw=draw,
    settings={"model": Setting("Model", {"gpt": "GPT", "lenet": "LeNet", "mlp": "MLP"})},
    terms=("throughput", "half precision"),
    code=CODE,
    sources=(Source.NVIDIA, Source.TORCH_AMP),
)
