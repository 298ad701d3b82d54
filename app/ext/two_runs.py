"""The page Two runs: the second run, curves one over the other, modules by difference, and one
module's histograms mirrored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import streamlit as st

from ampscope.analysis.distribution import merged, scale_exponent, shift_between
from ampscope.analysis.training import finite_parts
from ampscope.control import BASELINE
from ampscope.errors import BadInput
from ampscope.ext.diff import words as run_diff_words
from ampscope.ext.diff.run_diff import RunDiff, compared
from ampscope.ext.diff.runs import read_values, recorded
from ampscope.ext.diff.two_runs import Pair, pairs, parting, parting_answer
from ampscope.numerics.formats import FORMATS
from ampscope.records import OP_STEP, Frame, Role, RunInfo, ShadowRecord, StepRecord
from ampscope.store.reader import Reader
from ampscope.story.palette import MEASURE, OVERFLOW
from ampscope.story.shared import ROLE_NAMES, format_of
from app import chart, links, states, store
from app.chart import KeyFigure
from app.figures.exponents import mirrored_bars
from app.figures.training import DrawnCurve, paired_curves
from app.gradients.page import bins_table, pick_role
from app.runs import run_page
from app.runs.module_names import name_of
from app.text import cut, percent, plural

COLORS, DASHES = (MEASURE, OVERFLOW), ("solid", "dash")
NAME_LENGTH = 32
ROWS_PX = 420


@dataclass(frozen=True, slots=True)
class Both:
    """What is read of the two runs."""

    runs: tuple[RunInfo, RunInfo]
    names: tuple[str, str]  # distinct
    steps: tuple[list[StepRecord], list[StepRecord]]


def pick_second(first: RunInfo) -> RunInfo | None:
    """The run beside the first, bound to the URL's ``second``; None where there is no other."""
    others = [run for run in store.trainings() if run.id != first.id]
    asked = links.wanted("second")
    by_id = {run.id: run for run in others}
    if asked and asked not in by_id and asked != first.id:
        try:  # further back, or the run of a control
            by_id[asked] = store.run(asked)
        except BadInput as error:
            states.unreadable(str(error))
    if not by_id:
        return None
    chosen = links.select(
        "Beside",
        "second",
        list(by_id),
        default=likely(first, list(by_id.values())).id,
        format_func=lambda id_: run_page.label(by_id[id_]),
        help="Type to search. The address of this page names both runs.",
    )
    return by_id[chosen]


def likely(first: RunInfo, others: Sequence[RunInfo]) -> RunInfo:
    """The run that one most likely wants beside ``first``: of the same group, then of the same
    workload; the newest of those."""

    def rank(run: RunInfo) -> tuple[bool, bool, float]:
        same_group = bool(first.spec.group) and run.spec.group == first.spec.group
        return not same_group, run.spec.workload != first.spec.workload, -run.created

    return min(others, key=rank)


def read(first: RunInfo, second: RunInfo) -> Both:
    """Their steps, and names that tell them apart."""
    names = [cut(_name(run), NAME_LENGTH) for run in (first, second)]
    if names[0] == names[1]:
        names = [f"{names[0]} (first)", f"{names[1]} (second)"]
    return Both((first, second), (names[0], names[1]), (store.steps(first), store.steps(second)))


def _name(run: RunInfo) -> str:
    if run.spec.kind == "script" and run.spec.control == BASELINE:
        return f"{run_page.name_of(run)} unchanged"
    return run_page.name_of(run)


def show_overview(both: Both) -> None:
    """The sentence, key figures and the curves."""
    found = parting(*both.steps)
    totals = [store.totals(run) for run in both.runs]
    chart.sentence(parting_answer(both.names, found))
    skipped = [t.skipped for t in totals]
    bad = [t.nonfinite_losses + t.nonfinite_norms for t in totals]
    chart.key_figures(
        [
            KeyFigure("Steps of both", f"{found.steps:,}", "steps with a loss in both runs"),
            KeyFigure(
                "Skipped steps", f"{skipped[0]:,} / {skipped[1]:,}", "first run / second run"
            ),
            KeyFigure("Not finite", f"{bad[0]:,} / {bad[1]:,}", "losses and gradient norms"),
        ]
    )
    if not any(both.steps):
        return
    chart.see(
        f"{both.names[0]} is the solid blue line, {both.names[1]} the dashed orange one; a cross "
        "is a skipped step. All panels share the axis of steps."
    )
    drawn = []
    for place, steps in enumerate(both.steps):
        numbers = [s.step for s in steps]
        losses = finite_parts(numbers, [s.loss for s in steps])
        norms = finite_parts(numbers, [s.grad_norm for s in steps])
        drawn.append(
            (DrawnCurve(both.names[place], losses, COLORS[place], DASHES[place]), norms, steps)
        )
    chart.show(paired_curves(drawn), "two-runs", lambda: curves_table(both), key="two-curves")


def show_difference(both: Both) -> None:
    """Where two runs that were made to be compared first compute other numbers; their dtypes and
    what was around them. Nothing for other runs."""
    if not all(OP_STEP in dict(run.spec.settings) for run in both.runs):
        return
    second = both.runs[1]
    found = _difference(both.runs[0], second.id, store.version(second))
    st.subheader("First difference", anchor=False)
    chart.see(" ".join(run_diff_words.sentences(found)))
    chart.see(f"A is {both.names[0]}, B {both.names[1]}.")
    st.subheader("Dtypes", anchor=False)
    chart.see(run_diff_words.ledger_sentence(found.ledger))
    if found.ledger:
        table = ledger_table(found)
        chart.table(table, "dtypes-of-both", key="two-dtypes", most_px=ROWS_PX)
    if found.settings:
        with chart.details("What was around the runs"):
            rows = [(s.name, s.first or "none", s.second or "none") for s in found.settings]
            frame = pd.DataFrame(rows, columns=["Setting", "In A", "In B"])
            chart.table(frame, "settings-of-both", key="two-settings", most_px=ROWS_PX)


def ledger_table(found: RunDiff) -> pd.DataFrame:
    """One row a tensor whose dtype is not the same in both."""
    rows = run_diff_words.ledger_rows(found.ledger)
    return pd.DataFrame(rows, columns=["Kind", "Tensor", "In A", "In B"])


@store.of_run
def _difference(reader: Reader, run_id: str, second: str, version: str) -> RunDiff:
    """``version``, that of the second run, makes the cache forget what it held before."""
    first, other = recorded(reader, run_id), reader.run(second)
    return compared(first.values, [read_values(reader, other)])


def curves_table(both: Both) -> pd.DataFrame:
    """A row for each run and step."""
    rows = [
        (name, s.step, s.loss, s.scale, s.grad_norm, s.skipped)
        for name, steps in zip(both.names, both.steps, strict=True)
        for s in steps
    ]
    columns = ["run", "step", "loss", "loss_scale", "gradient_norm", "skipped"]
    return pd.DataFrame(rows, columns=columns)


@dataclass(frozen=True, slots=True)
class RoleValues:
    """One role of both runs at a step that both recorded."""

    role: Role
    step: int
    frames: tuple[Frame, Frame]
    shadows: tuple[list[ShadowRecord], list[ShadowRecord]]


def pick_values(both: Both) -> RoleValues | None:
    """Role and step; None where the runs have no frames of the same step."""
    common = {role: steps for role in ROLE_NAMES if (steps := _common_steps(both, role))}
    if not common:
        return None
    left, right = st.columns([2, 5], vertical_alignment="bottom")
    with left:
        role = pick_role(list(common))
    with right:
        step = links.slide("Step", "both_step", common[role])
    frames = [store.frame(run, role, step) for run in both.runs]
    if frames[0] is None or frames[1] is None:
        return None
    first, second = (store.shadows(run, role, step) for run in both.runs)
    return RoleValues(role, step, (merged(frames[0]), merged(frames[1])), (first, second))


def _common_steps(both: Both, role: Role) -> list[int]:
    """Frames of one step alone: sums over several steps of two runs cannot be compared."""
    single = [
        {first for first, last in store.frame_spans(run, role) if first == last}
        for run in both.runs
    ]
    return sorted(single[0] & single[1])


def show_modules(both: Both, values: RoleValues | None) -> list[Pair]:
    """The table of modules, those that differ most first."""
    st.subheader("Modules by difference", anchor=False)
    first, second = (store.modules(run) for run in both.runs)
    found = (
        pairs(first, second, None, None)
        if values is None
        else pairs(first, second, *values.frames, values.shadows)
    )
    if values is None and all(pair.is_alike for pair in found):
        chart.see(
            f"Modules cannot be compared: {_no_histograms(both)}, and the weights of the same "
            "modules have the same dtypes."
        )
        return found
    chart.see(modules_seen(both.names, found, values))
    if found:
        table = modules_table(found)
        if values is None:  # nothing is known of what they held
            table = table[["Module", "Type", "Weights in"]]
        chart.table(
            table,
            "modules-by-difference",
            key="two-modules",
            most_px=ROWS_PX,
            columns={"Module": st.column_config.TextColumn(pinned=True, width=180)},
        )
    return found


def _no_histograms(both: Both) -> str:
    """Why none are of the same step: a diagnosis takes them of the unchanged run alone."""
    having = [
        name
        for name, run in zip(both.names, both.runs, strict=True)
        if any(store.frame_spans(run, role) for role in Role)
    ]
    if len(having) == 1:
        return f"only {having[0]} has histograms"
    return "the histograms are of other steps" if having else "neither run has histograms"


def modules_seen(names: tuple[str, str], found: Sequence[Pair], values: RoleValues | None) -> str:
    """Above the table."""
    if not found:
        return "Neither run holds a module."
    differing = [pair for pair in found if not pair.is_alike]
    text = f"{len(differing):,} of {plural(len(found), 'module')} differ in dtype or in values."
    if values is None:
        return text + " The runs have no histograms of the same step, so only dtypes are compared."
    lost = [pair for pair in found if pair.lost_apart]
    if lost:
        worst = max(lost, key=lambda pair: abs(pair.lost_apart or 0))
        text += (
            f" Most apart in underflow: {cut(name_of(worst.path))}, where {names[0]} lost "
            f"{percent(worst.first.lost or 0.0)} of its {ROLE_NAMES[values.role]} at step "
            f"{values.step:,}, {names[1]} {percent(worst.second.lost or 0.0)}."
        )
    elif any(p.zeros_apart is not None and p.lost_apart is None for p in found):
        text += (
            " How much underflowed is not known of every module: a run in half precision has no "
            "fp32 shadow of this step."
        )
    apart = [pair for pair in found if pair.zeros_apart]
    if apart:
        worst = max(apart, key=lambda pair: abs(pair.zeros_apart or 0))
        shares = [percent(side.zeros or 0.0) for side in (worst.first, worst.second)]
        text += (
            f" Most in zeros: {cut(name_of(worst.path))}, whose {ROLE_NAMES[values.role]} at step "
            f"{values.step:,} are zero in {shares[0]} of the elements of {names[0]} and in "
            f"{shares[1]} of those of {names[1]}."
        )
    return text + (
        f" First is {names[0]}, second {names[1]}. What is zero in one run alone was lost there, "
        "as long as both have the same weights: at the first steps. Lost is what underflowed by "
        "an fp32 shadow of the run itself."
    )


def modules_table(found: Sequence[Pair]) -> pd.DataFrame:
    """One row a module."""
    return pd.DataFrame(
        {
            "Module": [name_of(p.path) for p in found],
            "Type": [p.type for p in found],
            "Lost, difference": [_share(p.lost_apart, signed=True) for p in found],
            "Values in": [_both(p.first.values, p.second.values) for p in found],
            "Weights in": [_both(p.first.weights, p.second.weights) for p in found],
            "Lost, first": [_share(p.first.lost) for p in found],
            "Lost, second": [_share(p.second.lost) for p in found],
            "Zero, difference": [_share(p.zeros_apart, signed=True) for p in found],
            "Zero, first": [_share(p.first.zeros) for p in found],
            "Zero, second": [_share(p.second.zeros) for p in found],
            "Not finite": [_both(p.first.nonfinite, p.second.nonfinite) for p in found],
        }
    )


def _both(first: object, second: object) -> str:
    """One text where both are the same; of weights None means that the module is not there."""
    one, other = ("none" if value in (None, "") else str(value) for value in (first, second))
    return one if one == other else f"{one} → {other}"


def _share(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "none"
    sign = "+" if signed and value > 0 else "−" if signed and value < 0 else ""
    return sign + percent(abs(value))


def show_module(both: Both, values: RoleValues, found: Sequence[Pair]) -> None:
    """Both histograms of one module, the second upside down."""
    paths = [p.path for p in found if p.first.values is not None and p.second.values is not None]
    if not paths:
        return
    st.subheader("One module", anchor=False)
    by_name = {name_of(path): path for path in paths}
    name = links.select(
        "Module", "module", list(by_name), help="Those that differ most come first."
    )
    rows = [
        _row(run, frame, by_name[name]) for run, frame in zip(both.runs, values.frames, strict=True)
    ]
    shifts = [
        (shift_between(frame.scale, 0) if values.role.is_gradient else 0) or 0
        for frame in values.frames
    ]
    chart.see(module_seen(both.names, name, values, shifts))
    fmt = FORMATS[_format(both.runs[0])]
    title = "magnitude, unscaled" if values.role.is_gradient else "magnitude"
    figure = mirrored_bars(np.stack(rows), fmt, (shifts[0], shifts[1]), both.names, x_title=title)
    labels: list[tuple[str, Sequence[object]]] = [("run", both.names), ("step", [values.step] * 2)]
    chart.show(
        figure,
        "two-histograms",
        lambda: bins_table(labels, np.stack(rows), shifts),
        key="two-histograms",
    )


def module_seen(
    names: tuple[str, str], module: str, values: RoleValues, shifts: Sequence[int]
) -> str:
    """Above the mirrored histogram."""
    text = (
        f"{ROLE_NAMES[values.role].capitalize()} of {cut(module)} at step {values.step:,}: "
        f"{names[0]} above, {names[1]} below. What one lacks at the left end, the other shows."
    )
    if any(shifts):
        scales = [scale_exponent(frame.scale) for frame in values.frames]
        both = " and ".join("none" if e is None else f"2^{e}" for e in scales)
        text += f" Both are divided by their loss scales, {both}."
    return text


def _row(run: RunInfo, frame: Frame, path: str) -> np.ndarray:
    index = next(m.index for m in store.modules(run) if m.path == path)
    return np.asarray(frame.rows[frame.modules.index(index)])


@store.of_run
def _format(reader: Reader, run_id: str) -> str:
    return format_of(reader, reader.run(run_id)).name
