"""The page Loss scale: what the scaler did step by step, who held the NaN or Inf at every skip,
what another scaler would have done (the lab), and which scales suit every module.

A run of up to store.POINTS steps is shown as it was recorded. Of a longer one real steps stand for
the rest, with every change of scale and every bad step; the counts are exact all the same, and a
part that is asked for is read again in full resolution.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
import streamlit as st

from ampscope.analysis import scale_window
from ampscope.analysis.scale_summary import ScaleSummary, summarize
from ampscope.analysis.skips import BadStep, SkipCause, bad_steps, skip_causes
from ampscope.analysis.training import FiniteParts, finite_parts, is_bad
from ampscope.diagnosis.result import gpu_that_emulates_bf16
from ampscope.numerics.formats import FP16
from ampscope.numerics.histogram import NAN, NEG_INF, POS_INF
from ampscope.observations import Call
from ampscope.records import Frame, NonFiniteRecord, Role, RunInfo, StepRecord, StepTotals
from ampscope.scalers import replay as lab
from ampscope.store.reader import Reader
from ampscope.store.series import first_nonfinite
from ampscope.story import training_words
from app import chart, links, states, store
from app.figures.loss_scale import replayed_scales, scale_windows
from app.figures.training import scale_trajectory
from app.runs.loss_scales import optimizers, skip_evidence, window_sentence
from app.runs.module_names import name_of
from app.text import cut, percent, plural, power_of_two

TABLE_PX = 380
WHY = (
    "calibration: no step had been taken yet, and the next one was taken at a smaller scale, which "
    "is how GradScaler finds its scale. growth probing: the same, right after the scale had grown. "
    "spike: steps near it were taken at this scale, and this step's gradients are too large for it "
    "in fp32 too. NaN alone: weights' gradients hold NaN and none holds Inf. A formula such as 0/0 "
    "made it, or an Inf turned into NaN on its way; output gradients of that step tell. fault: the "
    "loss or fp32's own gradients were not finite, or a scale of 1 did not help. Where none of "
    "these is proved, an fp32 shadow of the step tells a batch with large gradients from a fault "
    "(--shadow-every 1 of a probe, record_next(reference=True) of a watched training)."
)
ENDS = 500  # first and last steps that are read in full: the search for a scale takes a few dozen
STEADY_SHARE = 0.25  # of the run, at its end, as in analysis.loss_scale
MOST = 100  # rows of a long run's table; the parameters of each are read for themselves
MOST_BARS = 30  # modules in the chart; more have no room for their names
MOST_STEPS = 300  # whose windows the advice rests on, evenly over the run
# Histograms (modules x recorded steps) that the page reads by itself, which takes 0.3 s of
# processor time; more are read when a user asks for it.
AT_ONCE = 50_000
_CALLS = {
    "torch": "GradScaler(init_scale={scale}, growth_interval={interval})",
    "paddle": "GradScaler(init_loss_scaling={scale}, incr_every_n_steps={interval})",
    "keras": "LossScaleOptimizer(inner, initial_scale={scale}, dynamic_growth_steps={interval})",
}
EXPONENTS = tuple(range(33))
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
FACTORS = (1.5, 2.0, 4.0, 8.0)
BACKOFFS = (0.125, 0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The shown steps of a run, and what is said of all of them."""

    steps: list[StepRecord]
    summary: ScaleSummary  # of the whole run
    totals: StepTotals  # of the whole run
    loss: FiniteParts  # of the shown steps
    norm: FiniteParts
    span: tuple[int, int]  # first and last step that are shown

    @property
    def is_part(self) -> bool:
        """Whether a part of the run was asked for."""
        return self.span != (self.totals.first_step, self.totals.last_step)

    @property
    def is_thinned(self) -> bool:
        """Whether shown steps stand for others."""
        return len(self.steps) < min(self.totals.steps, self.span[1] - self.span[0] + 1)


def read(run: RunInfo) -> Trajectory:
    """The steps that the URL's ``first`` and ``last`` ask for, all of them by default."""
    totals = store.totals(run)
    span = asked_span(totals)
    steps = store.steps(run, *span)
    numbers = [s.step for s in steps]
    return Trajectory(
        steps,
        whole_summary(run),
        totals,
        finite_parts(numbers, [s.loss for s in steps]),
        finite_parts(numbers, [s.grad_norm for s in steps]),
        span,
    )


def asked_span(totals: StepTotals) -> tuple[int, int]:
    """First and last step of the URL, within the run's."""
    low, high = totals.first_step or 0, totals.last_step or 0
    first, last = links.wanted_number("first"), links.wanted_number("last")
    first, last = low if first is None else first, high if last is None else last
    return (first, last) if low <= first < last <= high else (low, high)


@store.of_run
def whole_summary(reader: Reader, run_id: str) -> ScaleSummary:
    """Over all steps, in a time that does not depend on how many there are."""
    totals = reader.step_totals(run_id)
    shown = reader.overview(run_id, store.POINTS)
    if totals.first_step is None or totals.last_step is None or len(shown) >= totals.steps:
        return summarize(shown)
    head = reader.overview(run_id, ENDS, totals.first_step, totals.first_step + ENDS - 1)
    tail = reader.overview(run_id, ENDS, totals.last_step - ENDS + 1, totals.last_step)
    return of_ends(head, shown, tail, totals)


def of_ends(
    head: Sequence[StepRecord],
    shown: Sequence[StepRecord],
    tail: Sequence[StepRecord],
    totals: StepTotals,
) -> ScaleSummary:
    """The summary of a run of which the first and last steps are known in full, and in between
    every bad step and every change of scale."""
    known = {s.step: s for s in (*head, *shown, *tail)}
    summary = summarize([known[number] for number in sorted(known)])
    first, last = totals.first_step or 0, totals.last_step or 0
    late = [s.scale for s in shown if s.step > last - STEADY_SHARE * (last - first)]
    return replace(
        summary,
        step_count=totals.steps,
        is_steady=len(set(late)) == 1 and late[0] is not None and not tail[-1].skipped,
        good_since=last - summary.skips[-1] if summary.skips else totals.steps,
    )


def show_overview(found: Trajectory) -> None:
    """The sentence and the key figures."""
    summary, loss, totals = found.summary, found.loss, found.totals
    chart.sentence(training_words.scale_answer(summary, totals, loss))
    chart.key_figures(training_words.scale_figures(summary, totals, loss, found.steps))


def show_trajectory(found: Trajectory) -> None:
    """The chart."""
    if found.summary.last_scale is None:
        states.nothing_recorded(
            "This run has no loss scale.",
            "It ran without a GradScaler; its loss and gradient norm are below.",
        )
    pick_span(found)
    chart.see(chart_seen(found))
    figure = scale_trajectory(found.steps, found.loss, found.norm)

    def table() -> pd.DataFrame:
        """All that is known of every step."""
        return pd.DataFrame([dataclasses.asdict(s) for s in found.steps])

    chart.show(figure, "loss-scale", table, key="loss-scale")


def pick_span(found: Trajectory) -> None:
    """A slider over the whole run, for one whose steps are not all shown at once."""
    low, high = found.totals.first_step or 0, found.totals.last_step or 0
    if found.totals.steps <= store.POINTS and not found.is_part:
        return
    key = links.widget_key("first-last", found.span)

    def keep(first: int | None, last: int | None) -> None:
        links.keep("first", first)
        links.keep("last", last)

    def moved() -> None:
        if links.is_moved("first-last", key):
            keep(*st.session_state[key])

    left, right = st.columns((5, 1), vertical_alignment="bottom", gap="small")
    left.slider(
        "Steps to show",
        low,
        high,
        found.span,
        key=key,
        on_change=moved,
        help=f"A part of at most {store.POINTS:,} steps is shown in full.",
    )
    right.button("Whole run", disabled=not found.is_part, on_click=keep, args=(None, None))


def chart_seen(found: Trajectory) -> str:
    """Above the chart."""
    loss, norm = found.loss, found.norm
    text = "All panels share the axis of steps."
    if found.is_thinned or found.is_part:
        first, last = found.span
        text += f" Shown: steps {first:,} to {last:,}"
        text += (
            f", {len(found.steps):,} of them drawn: the extremes, every change of scale and the "
            "bad ones."
            if found.is_thinned
            else ", all of them."
        )
    if any(s.skipped for s in found.steps):
        text += " A cross on the scale is a skipped step."
    broken = [
        f"{name} at {plural(s.nonfinite_count, 'step')}"
        for name, s in (("the loss", loss), ("the gradient norm", norm))
        if s.nonfinite_count
    ]
    if broken:
        return f"{text} Not finite, and so in the band at the bottom: {' and '.join(broken)}."
    return f"{text} Every recorded loss and gradient norm is finite."


def show_skips(run: RunInfo, found: Trajectory) -> None:
    """Skipped steps, and the parameters of one."""
    st.subheader("Skipped steps", anchor=False)
    bad, whole = read_bad_steps(run, found)
    chart.see(bad_steps_seen(bad, found.totals, whole))
    if not bad:
        return
    chart.table(
        _bad_table(bad),
        "skips",
        key="loss-scale-skips",
        most_px=TABLE_PX,
        columns={
            "Scale": st.column_config.NumberColumn(format="localized"),
            "Why": st.column_config.TextColumn(help=WHY),
        },
    )
    _one_skip(run, bad)


def read_bad_steps(run: RunInfo, found: Trajectory) -> tuple[list[BadStep], int]:
    """The rows of the table, in order of steps: all of a short run, the newest of a long one; and
    of how many bad steps in the shown part they are the newest (at least so many: where thousands
    are bad, not each of them is shown)."""
    # Of the whole run, whichever part is shown: a search is one by what came before it.
    whole = {s.step: s for s in (*store.steps(run), *found.steps)}
    steps = [whole[number] for number in sorted(whole)]
    if found.totals.steps <= store.POINTS:
        every = bad_steps(steps, _all_firsts(run), optimizers(run), skip_evidence(run, 0))
        shown = [b for b in every if found.span[0] <= b.step <= found.span[1]]
        return shown, len(shown)
    bad = [step for step in found.steps if is_bad(step)]
    known = skip_evidence(run, bad[-MOST:][0].step if bad else 0)
    causes = skip_causes(steps, optimizers(run), known)
    firsts = _firsts(run, tuple(step.step for step in bad[-MOST:]))
    rows = [
        BadStep(s.step, s.scale, s.skipped, *firsts.get(s.step, (0, "")), causes.get(s.step))
        for s in bad[-MOST:]
    ]
    return rows, len(bad) if found.is_part else max(len(bad), found.totals.bad)


@store.of_run
def _all_firsts(reader: Reader, run_id: str) -> dict[int, tuple[int, str]]:
    return first_nonfinite(reader, run_id)


@store.of_run
def _firsts(reader: Reader, run_id: str, steps: tuple[int, ...]) -> dict[int, tuple[int, str]]:
    """Of these steps: parameters with NaN or Inf, and the first in backward order."""
    found = {step: reader.nonfinite(run_id, step) for step in steps}
    return {step: (len(r), r[0].parameter) for step, r in found.items() if r}


def bad_steps_seen(found: Sequence[BadStep], totals: StepTotals, whole: int) -> str:
    """Above the table of skips: ``found`` are its rows, the newest of ``whole`` bad steps."""
    taken = [b for b in found if not b.skipped]
    if not found:
        if totals.bad:
            return "No step of the shown part was skipped, and no gradient held NaN or Inf."
        return "No step was skipped, and no gradient held NaN or Inf."
    text = f"{totals.skipped:,} of {plural(totals.steps, 'step')} were skipped."
    if len(found) < whole:
        text += f" The newest {len(found):,} of {whole:,} bad steps of the shown part are listed."
    if taken:
        text += (
            f" At {plural(len(taken), 'step')} gradients held NaN or Inf and the optimizer "
            "stepped anyway."
        )
    firsts = [b.first_parameter for b in found if b.first_parameter]
    if firsts:
        most = max(dict.fromkeys(firsts), key=firsts.count)
        often = "" if len(firsts) == 1 else f", at {firsts.count(most)} of {len(firsts)} such steps"
        text += f" Backward met {cut(most)} first{often}."
    return text


def _bad_table(bad: list[BadStep]) -> pd.DataFrame:
    why = {None: "", SkipCause.UNCLEAR: "not known without an fp32 shadow of this step"}
    return pd.DataFrame(
        {
            "Step": [b.step for b in bad],
            "Loss scale": [power_of_two(b.scale) if b.scale else "none" for b in bad],
            "Scale": [b.scale for b in bad],
            "Skipped": [b.skipped for b in bad],
            "First in backward": [b.first_parameter or "not recorded" for b in bad],
            "Parameters not finite": [b.parameter_count for b in bad],
            "Why": [why.get(b.cause, str(b.cause)) for b in bad],
        }
    )


def _one_skip(run: RunInfo, bad: list[BadStep]) -> None:
    steps = [b.step for b in bad if b.parameter_count]
    if not steps:
        st.caption("Which parameters held NaN or Inf was not recorded at these steps.")
        return
    step = links.select("Parameters of step", "skip", steps, writes_default=False)
    records = list(store.nonfinite(run, step))
    chart.see(f"At step {step}, {plural(len(records), 'parameter')} held NaN or Inf.")
    chart.table(
        parameters_table(records),
        f"nonfinite-step-{step}",
        key="loss-scale-parameters",
        most_px=TABLE_PX,
        columns={"Not finite, %": st.column_config.NumberColumn(format="%.3g")},
    )
    label = f"Step {step} on the Gradients page"
    links.link(links.GRADIENTS, label, run=run.id, step=str(step), role="weight_grad")


def parameters_table(records: list[NonFiniteRecord]) -> pd.DataFrame:
    """In backward order, the first that backward reached at the top."""
    return pd.DataFrame(
        {
            "Backward order": [r.order + 1 for r in records],
            "Parameter": [r.parameter for r in records],
            "NaN": [r.nan for r in records],
            "+Inf": [r.pos_inf for r in records],
            "-Inf": [r.neg_inf for r in records],
            "Elements": [r.total for r in records],
            "Not finite, %": [
                100 * (r.nan + r.pos_inf + r.neg_inf) / r.total if r.total else None
                for r in records
            ],
        }
    )


def draw_lab(run: RunInfo, found: Trajectory) -> None:
    """Controls, chart, and what they say; nothing for a run without a scaler."""
    if found.summary.last_scale is None:
        return
    st.subheader("Scaler lab", anchor=False)
    if found.totals.steps > store.POINTS:
        states.nothing_recorded(
            "A replay needs every step.", f"It is offered for runs of at most {store.POINTS:,}."
        )
        return
    count = max(len(store.frame_steps(run, r)) for r in (Role.GRAD_OUTPUT, Role.WEIGHT_GRAD))
    if not wants_all(run, count, "lab", f"Replay other scalers on all {count:,} recorded steps"):
        return
    seen = recorded_gradients(run)
    if not seen.histograms:
        states.no_histograms(run)
        return
    policy, own = lab.own_policy(run.spec), lab.own_settings(run.spec, found.steps[0].scale)
    odd = lab.first_difference(seen, found.steps, policy, own)
    if odd is not None:
        st.caption(
            f"With the recorded settings, the replay diverges from the recording at step {odd:,}: "
            "this run has another growth interval than the default, or a scaler whose state was "
            "set."
        )
    policy, settings = _controls(policy, own)
    made = lab.replay(seen.gradients, policy, settings, seen.updates)
    shares = lab.lost_shares(seen, made)
    chart.see(_sentence(found.steps, made, shares, policy))
    figure = replayed_scales(found.steps, made)
    chart.show(figure, "scaler-lab", lambda: _table(found.steps, made, shares), key="scaler-lab")


def wants_all(run: RunInfo, steps: int, name: str, what: str) -> bool:
    """Whether to read the histograms of ``steps`` steps now. Bound to the URL's ``name``; many of
    them wait until the user asks for ``what``."""
    if steps * len(store.modules(run)) <= AT_ONCE:
        return True
    key = f"loss-scale:{name}"
    is_on = st.toggle(what, links.wanted(name) == "on", key=key)
    links.keep(name, "on" if is_on else None)
    return is_on


@store.of_run
def recorded_gradients(reader: Reader, run_id: str) -> lab.RecordedRun:
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
    return lab.recorded_run(reader.steps(run_id), frames_of, FP16, calls)


def _controls(own: lab.Policy, run: lab.ScalerSettings) -> tuple[lab.Policy, lab.ScalerSettings]:
    """What is chosen. ``run``: the run's own settings, always among the choices."""
    columns = st.columns((3, 2, 2, 2, 2), vertical_alignment="bottom")
    name = links.select(
        "Policy", "policy", list(lab.POLICIES), default=own.name,
        format_func=lambda n: lab.POLICIES[n].title,
        place=columns[0], writes_default=False,
    )  # fmt: skip
    policy = lab.POLICIES[name]
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
    return policy, lab.ScalerSettings(scales[first], interval, growth, backoff)


def _scales(own: float) -> dict[float, float]:
    """Exponent -> first scale, in order; the run's own need not be a power of two."""
    scales: dict[float, float] = {e: 2.0**e for e in EXPONENTS}
    if 0 < own < math.inf:
        exponent = math.log2(own)
        scales[int(exponent) if own == 2.0 ** int(exponent) else exponent] = own
    return dict(sorted(scales.items()))


def _sentence(
    steps: Sequence[StepRecord],
    made: lab.Replay,
    shares: Sequence[float | None],
    policy: lab.Policy,
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
    steps: Sequence[StepRecord], made: lab.Replay, shares: Sequence[float | None]
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


def draw_windows(run: RunInfo) -> None:
    """Nothing for a run without output gradients in fp16."""
    steps = store.frame_steps(run, Role.GRAD_OUTPUT)
    if not steps:
        return
    st.subheader("Safe loss scales", anchor=False)
    read = min(len(steps), MOST_STEPS)
    if wants_all(run, read, "advice", f"Advise a first scale from {read:,} of the recorded steps"):
        given = advice(run)
        if given is not None:
            chart.see(_advised(run, given))
    bad = {s.step for s in store.steps(run) if is_bad(s)}
    last = next((step for step in reversed(steps) if step not in bad), steps[-1])
    step = links.select("At step", "window", steps, default=last, writes_default=False)
    frame = store.frame(run, Role.GRAD_OUTPUT, step)
    if frame is None:
        return
    if frame.rows[:, [NAN, POS_INF, NEG_INF]].any():
        states.nothing_recorded(
            f"Gradients of step {step:,} were not finite.", "Choose another step."
        )
        return
    weights = store.frame(run, Role.WEIGHT_GRAD, step)
    windows = scale_window.module_windows(frame, FP16, weights)
    if not windows:
        states.nothing_recorded(
            f"No fp16 gradients of step {step:,} to read a scale from.", "Choose another step."
        )
        return
    names = {m.index: name_of(m.path) for m in store.modules(run)}
    common = scale_window.common_window(frame, FP16, weights)
    if common is not None:
        what = "output gradients" if weights is None else "output and weight gradients"
        text = window_sentence(
            common, names, FP16.name, what, scale_window.excluded_modules(frame, FP16)
        )
        chart.see(f"{text} {_opens(common, names, not gpu_that_emulates_bf16(run))}".strip())
    used = math.log2(frame.scale) if frame.scale > 0 else None
    table = pd.DataFrame(
        {
            "module": [names.get(w.module, "?") for w in windows],
            "lowest scale, log2": [w.low for w in windows],
            "highest scale, log2": [w.high for w in windows],
        }
    )
    narrow = least_room(windows)
    few = len(narrow) < len(windows)
    shown = f"The {len(narrow)} of {len(windows):,} modules that leave least room. " if few else ""
    is_common = max(w.low for w in narrow) <= min(w.high for w in narrow)
    band = " The green band suits all of them." if is_common else ""
    dashed = "1, the scale of a step without one" if used == 0 else "the scale that the step used"
    line = "" if used is None else f" The dashed line is {dashed}."
    chart.see(f"{shown}A bar spans the loss scales that keep a module in fp16.{band}{line}")
    figure = scale_windows(narrow, names, used)
    chart.show(figure, "safe-scales", lambda: table, key="safe-scales")


@store.of_run
def advice(reader: Reader, run_id: str) -> lab.Advice | None:
    """A first scale and an interval for this run's gradients."""
    steps = reader.frame_steps(run_id, Role.GRAD_OUTPUT)
    every = max(1, math.ceil(len(steps) / MOST_STEPS))
    windows = [_window(reader, run_id, step) for step in steps[::every]]
    between = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) * every if steps else 1.0
    known = [window for window in windows if window is not None]
    return lab.advise(known, between, lab.skipped_scales(reader.overview(run_id, store.POINTS)))


def _window(reader: Reader, run_id: str, step: int) -> scale_window.ScaleWindow | None:
    frame = reader.frame(run_id, Role.GRAD_OUTPUT, step)
    if frame is None:
        return None
    found = scale_window.common_window(frame, FP16, reader.frame(run_id, Role.WEIGHT_GRAD, step))
    return None if found is None or found.spans else found


def _advised(run: RunInfo, given: lab.Advice) -> str:
    exponent = math.log2(given.initial_scale)
    or_bf16 = "" if gpu_that_emulates_bf16(run) else ", or use bf16"
    if exponent < 0:
        return (
            f"No loss scale of 1 or more keeps these gradients in fp16: {given.scale_reason}. They "
            "are too large by themselves, which no scaler can put right: find the step where they "
            f"grew{or_bf16}."
        )
    scale = f"2.0**{exponent:.0f}" if exponent == round(exponent) else repr(given.initial_scale)
    call = _CALLS[run.spec.framework].format(scale=scale, interval=given.growth_interval)
    return (
        f"For these gradients: {call}. {given.scale_reason.capitalize()}; {given.interval_reason}."
    )


def _opens(window: scale_window.ScaleWindow, names: dict[int, str], has_bf16: bool) -> str:
    """What would help where the window is empty; ``has_bf16``: the machine does not emulate it."""
    if window.spans:
        name = names.get(window.spans[0], "?")
        or_bf16 = ", or use bf16, whose exponents reach as far as fp32's" if has_bf16 else ""
        return f"Run {name} in fp32{or_bf16}."
    if window.low <= window.high:
        return ""
    low, high = (names.get(m, "?") for m in (window.lowest, window.highest))
    return (
        f"{'bf16 needs no window; or keep' if has_bf16 else 'Keep'} {high} in fp32, or give {low} "
        f"and {high} optimizers and scalers of their own."
    )


def least_room(
    windows: Sequence[scale_window.ModuleWindow],
) -> list[scale_window.ModuleWindow]:
    """Those whose lowest scale is highest or whose highest is lowest, in the model's order: they
    decide which scales suit all."""
    if len(windows) <= MOST_BARS:
        return list(windows)
    by_low = sorted(windows, key=lambda w: -w.low)
    by_high = sorted(windows, key=lambda w: w.high)
    half = MOST_BARS // 2
    chosen = {w.module for w in (*by_low[:half], *by_high[:half])}
    return [w for w in windows if w.module in chosen]
