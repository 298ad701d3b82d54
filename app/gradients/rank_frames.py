"""Histograms of one run, or of all ranks of a training added up.

Each rank thins its frames by itself. They add where they cover the same steps at the same loss
scale; a rank whose frame covers others is left out of that sum, and the page says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ampscope.analysis.ranks import merged
from ampscope.exponents import RAW_LEN
from ampscope.records import Frame, Role, RunInfo
from ampscope.store.reader import Reader
from ampscope.store.series import ModuleSeries, module_series
from app import store

Ranks = tuple[RunInfo, ...]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shown:
    """One frame to look at, and what it is made of."""

    frame: Frame
    ranks: tuple[int, ...]  # whose counts are in it
    left_out: tuple[int, ...]  # ranks that cover this step with other ones, or have lost it
    recorded_steps: int | None  # how many it adds up; None where that cannot be told


def spans(ranks: Ranks, role: Role) -> list[Span]:
    """First and last steps of the frames of any rank; one a first step, the longest."""
    longest: dict[int, int] = {}
    for run in ranks:
        for first, last in store.frame_spans(run, role):
            longest[first] = max(last, longest.get(first, last))
    return sorted(longest.items())


def shown(ranks: Ranks, role: Role, span: Span) -> Shown | None:
    """The frame of a span, added up over the ranks that recorded just these steps."""
    having = [run for run in ranks if store.frame_spans(run, role)]
    found = {run.spec.rank: store.frame(run, role, span[0]) for run in having}
    same = {r: f for r, f in found.items() if f is not None and _span(f) == span}
    if not same:
        return None
    scale = next(iter(same.values())).scale
    added = {r: f for r, f in same.items() if f.scale == scale}
    frame = merged(list(added.values())) if len(added) > 1 else next(iter(added.values()))
    left_out = tuple(rank for rank in found if rank not in added)
    one = next(run for run in having if run.spec.rank in added)
    newest = store.frame(one, role, store.frame_spans(one, role)[-1][0])
    return Shown(frame, tuple(added), left_out, recorded_steps(added[one.spec.rank], newest))


def recorded_steps(frame: Frame, single: Frame | None) -> int | None:
    """How many recorded steps a frame adds up. Each counts as many elements as ``single``, a frame
    of one step; where batches differ in size the division leaves a rest, and nothing is said."""
    if frame.last_step is None or frame.last_step == frame.step:
        return 1
    if single is None or single.last_step not in (None, single.step):
        return None
    whole, part = int(frame.rows.sum()), int(single.rows.sum())
    return whole // part if part and whole % part == 0 else None


def series(ranks: Ranks, role: Role, module: int) -> ModuleSeries:
    """One module's histograms over time. Rows of the same steps and scale are added up; where the
    ranks differ there is a row for each."""
    rows: dict[tuple[int, int, float], np.ndarray] = {}
    for run in ranks:
        own = _series(run, role, module)
        lasts = own.last_steps or own.steps
        for key, row in zip(zip(own.steps, lasts, own.scales, strict=True), own.rows, strict=True):
            rows[key] = rows[key] + row if key in rows else row
    keys = sorted(rows)
    return ModuleSeries(
        tuple(k[0] for k in keys),
        tuple(k[2] for k in keys),
        np.array([rows[k] for k in keys], np.int64).reshape(len(keys), RAW_LEN),
        tuple(k[1] for k in keys),
    )


@store.of_run
def _series(reader: Reader, run_id: str, role: Role, module: int) -> ModuleSeries:
    return module_series(reader, run_id, role, module)


def _span(frame: Frame) -> Span:
    return frame.step, frame.step if frame.last_step is None else frame.last_step


def nearest(spans_: Sequence[Span], step: int) -> Span:
    """The span that covers a step, else the one that lies nearest to it."""
    return min(spans_, key=lambda s: max(s[0] - step, step - s[1], 0))
