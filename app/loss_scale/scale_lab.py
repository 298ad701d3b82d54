"""The scaler lab on the Loss scale page: what another policy would have done here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from ampscope.formats import FP16
from ampscope.observations import Call
from ampscope.records import Frame, Role, RunInfo, StepRecord
from ampscope.scalers.policies import POLICIES, Policy, Settings
from ampscope.scalers.recorded import (
    RecordedRun,
    first_difference,
    lost_shares,
    own_policy,
    own_settings,
    recorded_run,
)
from ampscope.scalers.replay import Replay, replay
from ampscope.store.reader import Reader
from app import chart, layout, links, states, store
from app.figures.scale_lab import replayed_scales
from app.loss_scale.scale_data import Trajectory
from app.text import percent, plural, power_of_two

EXPONENTS = tuple(range(33))
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
FACTORS = (1.5, 2.0, 4.0, 8.0)
BACKOFFS = (0.125, 0.25, 0.5, 0.75)


def draw(run: RunInfo, found: Trajectory) -> None:
    """Controls, chart, and what they say; nothing for a run without a scaler."""
    if found.summary.last_scale is None:
        return
    st.subheader("Scaler lab", anchor=False)
    if found.totals.steps > store.POINTS:
        states.nothing_recorded(
            "A replay needs every step.", f"It is offered for runs of at most {store.POINTS:,}."
        )
        return
    seen = recorded(run)
    if not seen.histograms:
        states.no_histograms(run)
        return
    policy, own = own_policy(run.spec), own_settings(run.spec, found.steps[0].scale)
    odd = first_difference(seen, found.steps, policy, own)
    if odd is not None:
        st.caption(
            f"At its own settings the replay parts from what was recorded at step {odd:,}: this "
            "run has another growth interval than the default, or a scaler whose state was set."
        )
    policy, settings = _controls(policy, own)
    made = replay(seen.gradients, policy, settings, seen.turns)
    shares = lost_shares(seen, made)
    layout.see(_sentence(found.steps, made, shares, policy))
    figure = replayed_scales(found.steps, made)
    chart.show(figure, "scaler-lab", lambda: _table(found.steps, made, shares), key="scaler-lab")


@store.of_run
def recorded(reader: Reader, run_id: str) -> RecordedRun:
    """Every step of a run as the replay reads it."""
    frames = {
        (frame.step, role): frame
        for role in (Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)
        for frame in reader.frames(run_id, role)
        if frame.last_step is None
    }

    def frames_of(step: int) -> Sequence[Frame]:
        roles = (Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)
        return [frames[step, role] for role in roles if (step, role) in frames]

    calls = [o for o in reader.observations(run_id) if isinstance(o, Call)]
    return recorded_run(reader.steps(run_id), frames_of, FP16, calls)


def _controls(own: Policy, run: Settings) -> tuple[Policy, Settings]:
    """What is chosen. ``run``: the run's own settings, always among the choices."""
    columns = st.columns((3, 2, 2, 2, 2), vertical_alignment="bottom")
    name = links.select(
        "Policy", "policy", list(POLICIES), default=own.name,
        format_func=lambda n: POLICIES[n].title,
        place=columns[0], writes_default=False,
    )  # fmt: skip
    policy = POLICIES[name]
    usual = policy.defaults
    scales = _scales(run.initial_scale)
    first = links.select(
        "First scale", "first_scale", list(scales), default=round(math.log2(usual.initial_scale)),
        format_func=lambda e: f"2^{e}" if isinstance(e, int) else f"{scales[e]:,.8g}",
        place=columns[1], writes_default=False,
    )  # fmt: skip
    interval = links.select(
        "Growth interval", "interval", sorted({*INTERVALS, run.growth_interval}),
        default=usual.growth_interval,
        format_func=lambda n: plural(n, "step"), place=columns[2], writes_default=False,
        help="Finite steps in a row until the scale grows.",
    )  # fmt: skip
    growth, backoff = usual.growth_factor, usual.backoff_factor
    if "growth_factor" in policy.settable:
        growth = links.select(
            "Growth factor", "growth", sorted({*FACTORS, run.growth_factor}), default=growth,
            place=columns[3], writes_default=False,
        )  # fmt: skip
    if "backoff_factor" in policy.settable:
        backoff = links.select(
            "Backoff factor", "backoff", sorted({*BACKOFFS, run.backoff_factor}), default=backoff,
            place=columns[4], writes_default=False,
        )  # fmt: skip
    st.caption(policy.words)
    return policy, Settings(scales[first], interval, growth, backoff)


def _scales(own: float) -> dict[float, float]:
    """Exponent -> first scale, in order; the run's own need not be a power of two."""
    scales: dict[float, float] = {e: 2.0**e for e in EXPONENTS}
    if 0 < own < math.inf:
        exponent = math.log2(own)
        scales[int(exponent) if own == 2.0 ** int(exponent) else exponent] = own
    return dict(sorted(scales.items()))


def _sentence(
    steps: Sequence[StepRecord], made: Replay, shares: Sequence[float | None], policy: Policy
) -> str:
    skipped = sum(step.skipped for step in steps)
    known = [share for share in shares if share is not None]
    lost = f", and lose {percent(max(known))} of a step's gradients at the worst" if known else ""
    text = (
        f"On these gradients {policy.title} would skip {plural(made.skips, 'step')} (recorded: "
        f"{skipped:,}){lost}."
    )
    if made.first_guess is not None:
        text += (
            f" From step {made.first_guess:,} on it rests on a guess: the histograms do not tell "
            f"what {plural(len(made.guesses), 'step')} would have done at that scale."
        )
    return text


def _table(
    steps: Sequence[StepRecord], made: Replay, shares: Sequence[float | None]
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "step": [s.step for s in made.steps],
            "recorded scale": [s.scale for s in steps],
            "recorded skip": [s.skipped for s in steps],
            "replayed scale": [s.scale for s in made.steps],
            "replayed skip": [s.skipped for s in made.steps],
            "guess": [s.is_guess for s in made.steps],
            "lost share": list(shares),
            "scale": [power_of_two(s.scale) for s in made.steps],
        }
    )
