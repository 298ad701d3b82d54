"""What the page Gradients reads: histograms of one run, or of all ranks of a training added up.

Each rank thins its frames by itself. They add where they cover the same steps at the same loss
scale; a rank whose frame covers others is left out of that sum, and the page says which.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from ampscope.analysis import underflow
from ampscope.analysis.distribution import merged as by_module
from ampscope.analysis.distribution import scale_exponent, shift_between, zone_counts
from ampscope.analysis.ranks import merged as added_up
from ampscope.analysis.skips import SkipCause, skip_causes
from ampscope.analysis.training import is_bad
from ampscope.numerics.formats import NumberFormat
from ampscope.numerics.histogram import Raw, add_rows
from ampscope.records import Frame, Role, RunInfo, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.series import ModuleSeries, module_series, shadow_columns
from ampscope.story.shared import ROLE_NAMES, format_of
from app import store
from app.runs.loss_scales import optimizers, skip_evidence
from app.runs.module_names import names_by_index
from app.text import power, power_of_two

Ranks = tuple[RunInfo, ...]
Span = tuple[int, int]  # first and last step of a frame


def recorded_roles(ranks: Ranks) -> list[Role]:
    """Roles that have histograms, gradients first."""
    return [role for role in ROLE_NAMES if any(store.frame_spans(run, role) for run in ranks)]


class RoleFrames:
    """The frames that the ranks of a training hold of one role. What ``store`` gives is what
    :class:`ampscope.store.reader.Reader` gives, kept until the run has recorded more."""

    def __init__(self, ranks: Ranks, role: Role) -> None:
        self.ranks, self.role = ranks, role
        self._spans = [(run, own) for run in ranks if (own := store.frame_spans(run, role))]
        longest: dict[int, int] = {}
        for _, own in self._spans:
            for first, last in own:
                longest[first] = max(last, longest.get(first, last))
        self.spans: list[Span] = sorted(longest.items())  # of any rank, one a first step

    def summed(self, span: Span) -> SummedFrame:
        """Added up over the ranks that recorded just these steps. Raises LookupError where the
        frame is gone."""
        found = {run.spec.rank: store.frame(run, self.role, span[0]) for run, _ in self._spans}
        same = {
            r: frame for r, frame in found.items() if frame is not None and _span(frame) == span
        }
        if not same:
            raise LookupError(f"step {span[0]} of {self.role} was listed and is gone")
        scale = next(iter(same.values())).scale
        added = {rank: frame for rank, frame in same.items() if frame.scale == scale}
        frame = added_up(list(added.values())) if len(added) > 1 else next(iter(added.values()))
        run, own = next(pair for pair in self._spans if pair[0].spec.rank in added)
        newest = store.frame(run, self.role, own[-1][0])
        return SummedFrame(
            frame,
            ranks=tuple(added),
            left_out=tuple(rank for rank in found if rank not in added),
            recorded_steps=_recorded_steps(added[run.spec.rank], newest),
        )

    def series(self, module: int) -> ModuleSeries:
        """One module's histograms over time. Rows of the same steps and scale are added up; where
        the ranks differ there is a row for each."""
        found = [_series(run, self.role, module) for run, _ in self._spans]
        recorded = [
            key
            for own in found
            for key in zip(own.steps, own.last_steps or own.steps, own.scales, strict=True)
        ]
        keys, rows = add_rows(recorded, np.concatenate([own.rows for own in found]))
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return ModuleSeries(
            tuple(keys[n][0] for n in order),
            tuple(keys[n][2] for n in order),
            rows[order],
            tuple(keys[n][1] for n in order),
        )

    def first_bad(self) -> FirstBadStep | None:
        """The first step of any rank that was not finite or was skipped, and whose histograms were
        recorded. A skip with which GradScaler finds its scale is none: healthy runs have it."""
        starts = [first for first, _ in self.spans]
        for step, why in sorted(found for run in self.ranks for found in _bad_steps(run)):
            place = bisect_right(starts, step) - 1
            if place >= 0 and step <= self.spans[place][1]:
                return FirstBadStep(self.spans[place], why)
        return None


@dataclass(frozen=True, slots=True)
class SummedFrame:
    """One frame to look at, and what it is made of."""

    frame: Frame  # a row per module and dtype
    ranks: tuple[int, ...]  # whose counts are in it
    left_out: tuple[int, ...]  # ranks that cover this step with other ones, or have lost it
    recorded_steps: int | None  # how many it adds up; None where that cannot be told


@dataclass(frozen=True, slots=True)
class FirstBadStep:
    """The first bad step that a frame covers."""

    span: Span
    why: str


def _span(frame: Frame) -> Span:
    return frame.step, frame.step if frame.last_step is None else frame.last_step


def _recorded_steps(frame: Frame, single: Frame | None) -> int | None:
    """How many recorded steps a frame adds up. Each counts as many elements as ``single``, a frame
    of one step; where batches differ in size the division leaves a rest, and nothing is said."""
    if frame.last_step is None or frame.last_step == frame.step:
        return 1
    if single is None or single.last_step not in (None, single.step):
        return None
    whole, part = int(frame.rows.sum()), int(single.rows.sum())
    return whole // part if part and whole % part == 0 else None


@store.of_run
def _series(reader: Reader, run_id: str, role: Role, module: int) -> ModuleSeries:
    return module_series(reader, run_id, role, module)


def _bad_steps(run: RunInfo) -> list[tuple[int, str]]:
    """Step, and why it is bad, in order."""
    steps = store.steps(run)
    if not any(map(is_bad, steps)):
        return []
    causes = skip_causes(steps, optimizers(run), skip_evidence(run, 0))
    searches = (SkipCause.CALIBRATION, SkipCause.GROWTH)
    return [
        (s.step, _why_bad(s)) for s in steps if is_bad(s) and causes.get(s.step) not in searches
    ]


def _why_bad(step: StepRecord) -> str:
    if step.loss is not None and not math.isfinite(step.loss):
        return "the loss is not finite"
    return "it was skipped" if step.skipped else "gradients are not finite"


@dataclass(frozen=True, slots=True)
class RoleSnapshot:
    """One role at one step, as recorded or at another loss scale: all that the page draws of it."""

    summed: SummedFrame
    frame: Frame  # its rows, one per module, in the model's order
    fmt: NumberFormat
    counts: Raw  # [modules, 6]
    names: dict[int, str]
    view: ScaleView

    def name(self, module: int) -> str:
        """The module's name."""
        return self.names.get(module, f"module {module}")

    def place(self, module: int) -> int:
        """The module's row in ``frame`` and ``counts``."""
        return self.frame.modules.index(module)


def snapshot(
    frames: RoleFrames, summed: SummedFrame, fmt: NumberFormat, wanted: int | None, why_bad: str
) -> RoleSnapshot:
    """``wanted``: log2 of the loss scale to look at, None where none multiplies the values.
    ``why_bad``: of the first bad step with histograms, where these are of it."""
    frame = by_module(summed.frame)
    shift = (shift_between(frame.scale, wanted) if wanted is not None else None) or 0
    view = ScaleView(
        frames.role, _span(frame), summed.recorded_steps, why_bad, frame.scale, wanted, shift
    )
    names = names_by_index(store.modules(frames.ranks[0]))
    return RoleSnapshot(summed, frame, fmt, zone_counts(frame, fmt, shift), names, view)


@dataclass(frozen=True, slots=True)
class ScaleView:
    """Which role, steps and loss scale are looked at, and what that is called."""

    role: Role
    span: Span
    recorded_steps: int | None  # in the frame; None where that cannot be told
    why_bad: str  # of the first bad step with histograms, which these are
    recorded_scale: float
    wanted_exponent: int | None  # None where no loss scale multiplies these values
    shift: int

    @property
    def when(self) -> str:
        """Which steps are shown, and that these hold the first bad one."""
        first, last = self.span
        steps = f"Step {first}"
        if last != first:
            many = f"{self.recorded_steps:,} recorded" if self.recorded_steps else "several"
            steps = f"Steps {first:,} to {last:,} ({many} steps added up)"
        return steps + f", the first bad one recorded ({self.why_bad})" * bool(self.why_bad)

    @property
    def is_plain(self) -> bool:
        """True where the recorded gradients carry no scale: it is 1, or there is no scaler."""
        return self.recorded_scale == 1.0

    @property
    def axis_title(self) -> str:
        """Title of the magnitude axis, in Plotly's markup: at which loss scale the values are
        shown."""
        if not self.role.is_gradient:
            return "magnitude, as recorded"
        if self.wanted_exponent is None or self.shift == 0:
            exponent = scale_exponent(self.recorded_scale)
            scale = f"{self.recorded_scale:g}" if exponent is None else power(exponent)
            return f"magnitude, as recorded{'' if self.is_plain else f' (× {scale})'}"
        kind = "unscaled" if self.wanted_exponent == 0 else "at another scale"
        return f"magnitude, {kind} (× {power(self.wanted_exponent)})"

    @property
    def title(self) -> str:
        """Which of the views this is; the views are never mixed."""
        if not self.role.is_gradient:
            return "as recorded"
        recorded = power_of_two(self.recorded_scale)
        if self.wanted_exponent is None:
            return f"as recorded, at loss scale {recorded}"
        if self.shift == 0 and self.is_plain:
            return "as recorded, with no loss scale in them"
        if self.shift == 0:
            return f"as recorded, at the run's loss scale {recorded}"
        if self.wanted_exponent == 0:
            return f"unscaled (recorded at loss scale {recorded})"
        return f"as if the loss scale were 2^{self.wanted_exponent} (recorded at {recorded})"


@store.of_run
def own_format(reader: Reader, run_id: str) -> str:
    """Name of the run's own half format."""
    return format_of(reader, reader.run(run_id)).name


@store.of_run
def shadow_series(reader: Reader, run_id: str, role: Role) -> underflow.UnderflowOverTime:
    """What the shadows counted, by module and sampled step."""
    return underflow.from_columns(shadow_columns(reader, run_id, role))
