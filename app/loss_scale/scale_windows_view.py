"""Safe loss scales of every module at one step, who conflicts, and what would open the window."""

from __future__ import annotations

import math

import pandas as pd
import streamlit as st

from ampscope.analysis.scale_window import ScaleWindow, common_window, module_windows
from ampscope.exponents import NAN, NEG_INF, POS_INF
from ampscope.formats import FP16
from ampscope.records import Role, RunInfo
from ampscope.scalers.advice import Advice, advise, skipped_scales
from ampscope.store.reader import Reader
from app import chart, layout, links, states, store
from app.figures.scale_windows import scale_windows
from app.runs.module_names import name_of
from app.runs.scale_window import sentence

MOST_STEPS = 300  # whose windows the advice rests on, evenly over the run


def draw(run: RunInfo) -> None:
    """Nothing for a run without output gradients in fp16."""
    steps = store.frame_steps(run, Role.GRAD_OUTPUT)
    if not steps:
        return
    st.subheader("Safe loss scales", anchor=False)
    given = advice(run)
    if given is not None:
        layout.see(_advised(run, given))
    step = links.select("At step", "window", steps, default=steps[-1], writes_default=False)
    frame = store.frame(run, Role.GRAD_OUTPUT, step)
    if frame is None:
        return
    if frame.rows[:, [NAN, POS_INF, NEG_INF]].any():
        states.nothing_recorded(
            f"Gradients of step {step:,} were not finite.", "Choose another step."
        )
        return
    weights = store.frame(run, Role.WEIGHT_GRAD, step)
    windows = module_windows(frame, FP16, weights)
    if not windows:
        states.nothing_recorded(
            f"No fp16 gradients of step {step:,} to read a scale from.", "Choose another step."
        )
        return
    names = {m.index: name_of(m.path) for m in store.modules(run)}
    common = common_window(frame, FP16, weights)
    if common is not None:
        what = "output gradients" if weights is None else "output and weight gradients"
        layout.see(f"{sentence(common, names, FP16.name, what)} {_opens(common, names)}".strip())
    used = math.log2(frame.scale) if frame.scale > 0 else None
    table = pd.DataFrame(
        {
            "module": [names.get(w.module, "?") for w in windows],
            "lowest scale, log2": [w.low for w in windows],
            "highest scale, log2": [w.high for w in windows],
        }
    )
    figure = scale_windows(windows, names, used)
    chart.show(figure, "safe-scales", lambda: table, key="safe-scales")


@store.of_run
def advice(reader: Reader, run_id: str) -> Advice | None:
    """A first scale and an interval for this run's gradients."""
    steps = reader.frame_steps(run_id, Role.GRAD_OUTPUT)
    every = max(1, math.ceil(len(steps) / MOST_STEPS))
    windows = [_window(reader, run_id, step) for step in steps[::every]]
    between = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) * every if steps else 1.0
    known = [window for window in windows if window is not None]
    return advise(known, between, skipped_scales(reader.overview(run_id, store.POINTS)))


def _window(reader: Reader, run_id: str, step: int) -> ScaleWindow | None:
    frame = reader.frame(run_id, Role.GRAD_OUTPUT, step)
    if frame is None:
        return None
    found = common_window(frame, FP16, reader.frame(run_id, Role.WEIGHT_GRAD, step))
    return None if found is None or found.spans else found


_CALLS = {
    "torch": "GradScaler(init_scale={scale}, growth_interval={interval})",
    "paddle": "GradScaler(init_loss_scaling={scale}, incr_every_n_steps={interval})",
    "keras": "LossScaleOptimizer(inner, initial_scale={scale}, dynamic_growth_steps={interval})",
}


def _advised(run: RunInfo, given: Advice) -> str:
    exponent = math.log2(given.initial_scale)
    scale = f"2.0**{exponent:.0f}" if exponent == round(exponent) else repr(given.initial_scale)
    call = _CALLS[run.spec.framework].format(scale=scale, interval=given.growth_interval)
    return (
        f"For these gradients: {call}. {given.scale_reason.capitalize()}; {given.interval_reason}."
    )


def _opens(window: ScaleWindow, names: dict[int, str]) -> str:
    """What would help where the window is empty."""
    if window.spans:
        name = names.get(window.spans[0], "?")
        return f"Run {name} in fp32, or use bf16, whose exponents reach as far as fp32's."
    if window.low <= window.high:
        return ""
    low, high = (names.get(m, "?") for m in (window.lowest, window.highest))
    return (
        f"bf16 needs no window; or keep {high} in fp32, or give {low} and {high} optimizers and "
        "scalers of their own."
    )
