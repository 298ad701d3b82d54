"""What the Loss scale page knows of a run: the steps it shows, and a summary of all of them.

A run of up to POINTS steps is shown as it was recorded. Of a longer one real steps stand for the
rest, with every change of scale and every bad step; the counts are exact all the same, and a part
that is asked for is read again in full resolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import streamlit as st

from ampscope.analysis.loss_scale import FiniteParts, ScaleSummary, finite_parts, summarize
from ampscope.records import RunInfo, StepRecord, StepTotals
from ampscope.store.reader import Reader
from app import links, store

ENDS = 500  # first and last steps that are read in full: the search for a scale takes a few dozen
STEADY_SHARE = 0.25  # of the run, at its end, as in analysis.loss_scale
RANGE_KEY = "loss-scale:range"


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
    first, last = _asked("first", low), _asked("last", high)
    return (first, last) if low <= first < last <= high else (low, high)


def pick_span(found: Trajectory) -> None:
    """A slider over the whole run, for one whose steps are not all shown at once."""
    low, high = found.totals.first_step or 0, found.totals.last_step or 0
    if found.totals.steps <= store.POINTS and not found.is_part:
        return
    links.show(RANGE_KEY, found.span)
    left, right = st.columns((5, 1), vertical_alignment="bottom", gap="small")
    left.slider(
        "Steps to show",
        low,
        high,
        key=RANGE_KEY,
        on_change=_keep_span,
        help=f"A part of at most {store.POINTS:,} steps is shown in full.",
    )
    right.button("Whole run", disabled=not found.is_part, on_click=forget_span)


def forget_span() -> None:
    """Back to the whole run."""
    links.keep("first", None)
    links.keep("last", None)


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


def _asked(name: str, default: int) -> int:
    number = links.wanted_number(name)
    return default if number is None else number


def _keep_span() -> None:
    first, last = st.session_state[RANGE_KEY]
    links.keep("first", first)
    links.keep("last", last)
