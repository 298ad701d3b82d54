"""The trajectory that a policy would have taken over a recorded run's gradients.

    scale of step 0 = the policy's first
    for each recorded step: would its gradients have overflowed at the scale? (outcome)
        the policy's step function says the next scale

What the weights would have become is not replayed: a step that a policy skips, or does not, changes
the gradients after it. The answer is exact for the gradients as they were recorded. Where a
histogram cannot tell (the top bin is too coarse, or the step overflowed when it was recorded and a
smaller scale is asked for), the replay takes the likelier way and counts the step as a guess.

In this order: the policies, one a framework; a recorded run as the replay reads it; the replay and
what is read off it; a first scale and a growth interval for the next run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np

from ampscope.analysis.scale_window import ScaleWindow
from ampscope.analysis.skips import UNSCALED
from ampscope.numerics.formats import NumberFormat
from ampscope.numerics.histogram import ABOVE, EXPONENTS, Raw
from ampscope.observations import Call
from ampscope.records import Frame, Role, RunSpec, StepRecord


@dataclass(frozen=True, slots=True)
class Policy:
    """What one framework's scaler computes, edge cases included: in fp32, with the growth test, the
    floor and the refusal of an infinite scale as the framework has them. Tests drive the
    frameworks' real scalers in step with these functions.

        >>> policy = POLICIES["torch"]
        >>> policy.step(policy.start(), found_inf=True, settings=policy.defaults).scale
        32768.0

    Sources: torch `aten/src/ATen/native/cuda/AmpKernels.cu` (`_amp_update_scale_`) and its CPU
    version; Paddle `python/paddle/amp/grad_scaler.py` (`AmpScaler._update`); Keras
    `keras/src/optimizers/loss_scale_optimizer.py`; TensorFlow
    `tensorflow/python/training/experimental/loss_scale.py` (`DynamicLossScale`).
    """

    name: str
    title: str
    defaults: ScalerSettings
    settable: frozenset[str]  # names of ScalerSettings' fields that the framework lets one set
    advance: Callable[[ScalerState, bool, ScalerSettings], ScalerState]
    words: str  # what is special about it, one sentence
    last_decides: bool = False  # of several steps before an update, else any with Inf or NaN

    def start(self, settings: ScalerSettings | None = None) -> ScalerState:
        """Before the first step."""
        return ScalerState(_fp32((settings or self.defaults).initial_scale))

    def step(
        self, state: ScalerState, found_inf: bool, settings: ScalerSettings | None = None
    ) -> ScalerState:
        """After a step at ``state.scale`` whose gradients held Inf or NaN, or did not. A step with
        ``found_inf`` is skipped by every policy."""
        return self.advance(state, found_inf, settings or self.defaults)


@dataclass(frozen=True, slots=True)
class ScalerSettings:
    """What a person may set; a framework that fixes one ignores it (:attr:`Policy.settable`)."""

    initial_scale: float
    growth_interval: int  # finite steps in a row until the scale grows
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    backoff_after: int = 1  # steps with Inf or NaN in a row until the scale falls


@dataclass(frozen=True, slots=True)
class ScalerState:
    """Between two steps. ``scale`` is what the next step uses."""

    scale: float
    good: int = 0  # finite steps since the last growth or Inf
    bad: int = 0  # steps with Inf or NaN in a row, where the policy counts them


def _fp32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def _torch(state: ScalerState, found_inf: bool, settings: ScalerSettings) -> ScalerState:
    if found_inf:
        return ScalerState(_fp32(state.scale * settings.backoff_factor))
    good = state.good + 1
    if good != settings.growth_interval:
        return ScalerState(state.scale, good)
    grown = _fp32(state.scale * settings.growth_factor)
    return ScalerState(grown if math.isfinite(grown) else state.scale)


def _paddle(state: ScalerState, found_inf: bool, settings: ScalerSettings) -> ScalerState:
    if found_inf:
        bad = state.bad + 1
        if bad == settings.backoff_after:
            return ScalerState(_fp32(state.scale * _fp32(settings.backoff_factor)))
        return ScalerState(state.scale, 0, bad)
    good = state.good + 1
    if good == settings.growth_interval:
        return ScalerState(_fp32(state.scale * _fp32(settings.growth_factor)))
    return ScalerState(state.scale, good)


def _keras(state: ScalerState, found_inf: bool, settings: ScalerSettings) -> ScalerState:
    if found_inf:
        return ScalerState(_flushed(state.scale / 2))
    if state.good == settings.growth_interval - 1:
        return ScalerState(_fp32(state.scale * 2))
    return ScalerState(state.scale, state.good + 1)


def _tensorflow(state: ScalerState, found_inf: bool, settings: ScalerSettings) -> ScalerState:
    factor = settings.growth_factor
    if found_inf:
        return ScalerState(max(_flushed(state.scale / _fp32(factor)), 1.0))
    if state.good + 1 < settings.growth_interval:
        return ScalerState(state.scale, state.good + 1)
    grown = _fp32(state.scale * _fp32(factor))
    return ScalerState(grown if math.isfinite(grown) else state.scale)


def _flushed(value: float) -> float:
    """TensorFlow's kernels flush fp32 subnormals to zero."""
    rounded = _fp32(value)
    return rounded if abs(rounded) >= 2.0**-126 else 0.0


_ALL_FACTORS = ("growth_factor", "backoff_factor")
_ORDER: Final = (
    Policy(
        "torch", "PyTorch GradScaler", ScalerSettings(2.0**16, 2000),
        frozenset({"initial_scale", "growth_interval", *_ALL_FACTORS}), _torch,
        "It refuses to grow to Inf, and has no floor.",
    ),
    Policy(
        "paddle", "Paddle GradScaler", ScalerSettings(2.0**16, 2000),
        frozenset({"initial_scale", "growth_interval", *_ALL_FACTORS, "backoff_after"}), _paddle,
        "The scale falls after so many skipped steps in a row; it may grow to Inf and stay there.",
        last_decides=True,
    ),
    Policy(
        "paddle-amp-scaler", "Paddle AmpScaler", ScalerSettings(2.0**15, 1000),
        frozenset({"initial_scale", "growth_interval", *_ALL_FACTORS, "backoff_after"}), _paddle,
        "GradScaler's older name, with other defaults.", last_decides=True,
    ),
    Policy(
        "keras", "Keras 3 LossScaleOptimizer", ScalerSettings(2.0**15, 2000),
        frozenset({"initial_scale", "growth_interval"}), _keras,
        "The factors are fixed at 2; it may grow to Inf and stay there.",
    ),
    Policy(
        "tensorflow", "TensorFlow DynamicLossScale", ScalerSettings(2.0**15, 2000),
        frozenset({"initial_scale", "growth_interval", "growth_factor"}), _tensorflow,
        "One multiplier for both ways; it refuses to grow to Inf and never falls below 1.",
    ),
)  # fmt: skip
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType({p.name: p for p in _ORDER})


def allowed(policy: Policy, settings: ScalerSettings) -> ScalerSettings:
    """``settings`` with what the framework fixes at its own value."""
    fixed = {
        name: getattr(policy.defaults, name)
        for name in ScalerSettings.__dataclass_fields__
        if name not in policy.settable
    }
    return replace(settings, **fixed)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """``counts`` is [steps, ABOVE + 1]: finite output gradients of each step at its own scale."""

    gradients: tuple[StepGradients, ...]
    counts: Raw
    narrow: NumberFormat
    updates: tuple[UpdateWindow, ...] = ()  # which steps share an update of which scaler

    @property
    def histograms(self) -> int:
        """Steps that have any."""
        return sum(g.has_histogram for g in self.gradients)


def recorded_run(
    steps: Sequence[StepRecord],
    frames_of: Callable[[int], Sequence[Frame]],
    narrow: NumberFormat,
    calls: Iterable[Call] = (),
) -> RecordedRun:
    """``frames_of(step)`` gives the frames of output and weight gradients of one step; ``calls``
    are a script's."""
    gradients, counts = [], np.zeros((len(steps), ABOVE + 1), np.int64)
    for place, record in enumerate(steps):
        frames = frames_of(record.step)
        scale = record.scale if record.scale is not None else 1.0
        gradients.append(step_gradients(record.step, scale, record.skipped, frames, narrow))
        counts[place] = narrow_counts(frames, narrow)
    return RecordedRun(tuple(gradients), counts, narrow, update_windows(calls, steps))


@dataclass(frozen=True, slots=True)
class StepGradients:
    """What a step's histograms say about other scales.

    ``top`` is the exponent of the largest gradient that is bound to the narrow format, at the scale
    of the step; None where there is none, or where the step has no histogram.

    Bound to the format is what is computed in it: output gradients that flow in it, and weight
    gradients of the modules that have such (autocast computes those in fp16 and hands them to fp32
    weights). A gradient inside a module, between two of its functional ops, is not recorded; its
    overflow is seen at the scale that was run, and not predicted for others.
    """

    step: int
    scale: float
    found_inf: bool  # as recorded at ``scale``
    top: int | None
    max_exponent: int  # of the narrow format, 15 for fp16
    has_histogram: bool = True


def step_gradients(
    step: int, scale: float, found_inf: bool, frames: Iterable[Frame], narrow: NumberFormat
) -> StepGradients:
    """Of the frames of output and weight gradients of one step, as they were recorded."""
    counts = [bound_counts(frame, modules) for frame, modules in _bound(frames, narrow.name)]
    tops = [int(EXPONENTS[np.flatnonzero(row)[-1]]) for row in counts if row.any()]
    return StepGradients(
        step, scale, found_inf, max(tops, default=None), narrow.max_exponent, bool(counts)
    )


def _bound(frames: Iterable[Frame], dtype: str) -> list[tuple[Frame, frozenset[int]]]:
    """Each frame with the modules whose gradients are computed in ``dtype``."""
    every = list(frames)
    narrow = frozenset(
        module
        for frame in every
        if frame.role is Role.GRAD_OUTPUT
        for module, name in zip(frame.modules, frame.dtypes, strict=True)
        if name == dtype
    )
    return [(frame, narrow) for frame in every if frame.role.is_gradient]


def bound_counts(frame: Frame, modules: frozenset[int]) -> Raw:
    """Finite counts of the rows of ``modules``, summed."""
    keep = [module in modules for module in frame.modules]
    return np.asarray(frame.rows[keep][:, : ABOVE + 1].sum(axis=0))


def narrow_counts(frames: Iterable[Frame], narrow: NumberFormat) -> Raw:
    """Finite counts [ABOVE + 1] of the output gradients that flow in ``narrow``, all modules."""
    total = np.zeros(ABOVE + 1, np.int64)
    for frame in frames:
        if frame.role is Role.GRAD_OUTPUT:
            keep = [name == narrow.name for name in frame.dtypes]
            total += frame.rows[keep][:, : ABOVE + 1].sum(axis=0)
    return total


ONLY = "scaler0"


@dataclass(frozen=True, slots=True)
class UpdateWindow:
    """Places of the steps that one update of ``scaler`` looks back on.

    A GAN steps two optimizers and updates once; a training may have a scaler for each loss, or make
    a new one when it resumes. The log of calls shows it: ``scaler.step`` joins the window of its
    scaler, and ``scaler.update`` ends it.

        scaler0.step(d)  scaler0.step(g)  scaler0.update()   ->   UpdateWindow("scaler0", (0, 1))
    """

    scaler: str
    places: tuple[int, ...]


def update_windows(calls: Iterable[Call], steps: Sequence[StepRecord]) -> tuple[UpdateWindow, ...]:
    """In the order of the updates; steps without a scaler are in none. Without a log of updates
    every step is a window of the one scaler there is."""
    place_of = {step.step: place for place, step in enumerate(steps)}
    still_open: dict[str, list[int]] = {}
    updates: list[UpdateWindow] = []
    logged = False
    for call in calls:
        if call.name == "scaler_step" and call.step in place_of:
            still_open.setdefault(call.subject, []).append(place_of[call.step])
        elif call.name == "update":
            logged = True
            updates.append(UpdateWindow(call.subject, tuple(still_open.pop(call.subject, ()))))
    if not logged:
        return tuple(
            UpdateWindow(ONLY, (place,)) for place, s in enumerate(steps) if s.scale is not None
        )
    updates += [UpdateWindow(name, tuple(places)) for name, places in still_open.items()]
    return tuple(update for update in updates if update.places)


def first_scales(
    updates: Iterable[UpdateWindow], steps: Sequence[StepRecord]
) -> Mapping[str, float]:
    """The scale at which each scaler was first seen."""
    found: dict[str, float] = {}
    for update in updates:
        scale = steps[update.places[0]].scale
        if scale is not None:
            found.setdefault(update.scaler, scale)
    return found


@dataclass(frozen=True, slots=True)
class Replay:
    """A whole trajectory."""

    policy: str
    settings: ScalerSettings
    steps: tuple[Replayed, ...]

    @property
    def skips(self) -> int:
        """Steps that the policy would have left out."""
        return sum(step.skipped for step in self.steps)

    @property
    def guesses(self) -> tuple[int, ...]:
        """Steps whose outcome the histograms do not show."""
        return tuple(step.step for step in self.steps if step.is_guess)

    @property
    def first_guess(self) -> int | None:
        """From here on the trajectory may be another."""
        return self.guesses[0] if self.guesses else None


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step of a replay."""

    step: int
    scale: float
    skipped: bool
    fate: Fate
    is_guess: bool


class Fate(StrEnum):
    """Of a step's gradients at some scale."""

    FINITE = "finite"
    OVERFLOW = "overflow"
    COARSE = "coarse"  # the bin of the largest straddles the limit
    UNKNOWN = "unknown"  # it overflowed when it was recorded, or has no histogram


_NO_STARTS: Mapping[str, float] = MappingProxyType({})


def replay(
    gradients: Sequence[StepGradients],
    policy: Policy,
    settings: ScalerSettings,
    updates: Sequence[UpdateWindow] | None = None,
    starts: Mapping[str, float] = _NO_STARTS,
) -> Replay:
    """Over recorded steps in order.

    ``updates`` say which steps share an update of a scaler, else each has its own;
    ``starts`` are first scales of scalers, where they are not the settings'. A step in no window
    went through no scaler: it is not skipped, at whatever scale.
    """
    used = allowed(policy, settings)
    if updates is None:
        updates = [UpdateWindow(ONLY, (place,)) for place in range(len(gradients))]
    later = _later_tops(gradients)
    states: dict[str, ScalerState] = {}
    made: dict[int, Replayed] = {}
    for update in updates:
        if update.scaler not in states:
            first = starts.get(update.scaler, used.initial_scale)
            states[update.scaler] = policy.start(replace(used, initial_scale=first))
        state = states[update.scaler]
        for place in update.places:
            made[place] = _replayed(gradients[place], state.scale, later[place])
        looked_at = update.places[-1:] if policy.last_decides else update.places
        found_inf = any(made[place].skipped for place in looked_at)
        states[update.scaler] = policy.step(state, found_inf, used)
    steps = [
        made.get(n) or Replayed(g.step, 1.0, False, Fate.FINITE, False)
        for n, g in enumerate(gradients)
    ]
    return Replay(policy.name, used, tuple(steps))


def _replayed(recorded: StepGradients, scale: float, later: StepGradients | None) -> Replayed:
    """One step; of an unknown one ``later``, the next step that has finite gradients in a
    histogram, shows about how large its gradients are."""
    seen = fate(recorded, scale)
    skipped = seen in (Fate.OVERFLOW, Fate.COARSE)
    if seen is Fate.UNKNOWN:
        skipped = recorded.found_inf
        if later is not None and scale:
            skipped = fate(later, scale) in (Fate.OVERFLOW, Fate.COARSE)
    is_guess = seen in (Fate.COARSE, Fate.UNKNOWN)
    return Replayed(recorded.step, scale, skipped, seen, is_guess)


def fate(gradients: StepGradients, scale: float) -> Fate:
    """What would have become of the step at ``scale``.

    A histogram recorded at scale S says in which powers of two the scaled gradients lay. At k S
    they lie log2 k bins further. Where k is a power of two the answer is exact: an fp16 number
    times 2^j is an fp16 number, so gradients whose largest lies in [2^e, 2^(e+1)) overflow at 2^j S
    when e + j exceeds 15, and do not otherwise. A scale between powers of two moves a bin across
    two others; where the upper one lies beyond the limit and the lower does not, the bin is too
    coarse to decide.
    """
    if scale == gradients.scale:
        return Fate.OVERFLOW if gradients.found_inf else Fate.FINITE
    if math.isinf(scale):
        return Fate.OVERFLOW
    if not (0 < gradients.scale < math.inf and scale > 0):
        return Fate.UNKNOWN  # at 0, where a scaler ends that skipped 165 steps, nothing is left
    if gradients.found_inf:
        return Fate.OVERFLOW if scale > gradients.scale else Fate.UNKNOWN
    if scale < gradients.scale:
        return Fate.FINITE  # a smaller scale overflows nothing that was finite
    if not gradients.has_histogram:
        return Fate.UNKNOWN
    if gradients.top is None:
        return Fate.FINITE
    shift = math.log2(scale) - math.log2(gradients.scale)  # their quotient may leave the range
    low, high = gradients.top + math.floor(shift), gradients.top + math.ceil(shift)
    if high <= gradients.max_exponent:
        return Fate.FINITE
    return Fate.OVERFLOW if low > gradients.max_exponent else Fate.COARSE


def _later_tops(gradients: Sequence[StepGradients]) -> list[StepGradients | None]:
    """For each step the next one with finite gradients in a histogram."""
    found: list[StepGradients | None] = []
    following: StepGradients | None = None
    for recorded in reversed(gradients):
        if not recorded.found_inf and recorded.has_histogram:
            following = recorded
        found.append(following)
    return found[::-1]


def lost_shares(run: RecordedRun, replay: Replay) -> list[float | None]:
    """Of each step's non-zero gradients the share that becomes zero at the replay's scale; None for
    a step that is skipped, has no gradients recorded, or was recorded with Inf."""
    sums = np.cumsum(run.counts, axis=1)
    shares: list[float | None] = []
    for place, (made, seen) in enumerate(zip(replay.steps, run.gradients, strict=True)):
        total = int(sums[place, -1])
        are_scales = all(0 < scale < math.inf for scale in (made.scale, seen.scale))
        if made.skipped or seen.found_inf or not total or not are_scales:
            shares.append(None)
            continue
        shift = math.floor(math.log2(made.scale) - math.log2(seen.scale))
        below = run.narrow.zero_below_exponent - shift  # exponents that are lost lie below this
        place_of = int(np.searchsorted(EXPONENTS, below))
        shares.append(float(sums[place, place_of - 1]) / total if place_of else 0.0)
    return shares


def first_difference(
    run: RecordedRun, steps: Sequence[StepRecord], policy: Policy, own: ScalerSettings
) -> int | None:
    """The first step at which a replay at the run's own settings is not what was recorded: it has
    other settings than it seems, or a scaler whose state was set by hand. None: all agree."""
    starts = first_scales(run.updates, steps)
    made = replay(run.gradients, policy, own, run.updates, starts).steps
    for one, step in zip(made, steps, strict=True):
        if step.scale is not None and (one.scale, one.skipped) != (step.scale, step.skipped):
            return step.step
    return None


def own_settings(spec: RunSpec, first_scale: float | None) -> ScalerSettings:
    """A probe's are recorded; of any other run the first scale is, and its framework's defaults."""
    if spec.kind == "probe":
        asked = spec.scaler
        settings = ScalerSettings(
            asked.init_scale, asked.growth_interval, asked.growth_factor, asked.backoff_factor
        )
        return allowed(own_policy(spec), settings)
    return replace(own_policy(spec).defaults, initial_scale=first_scale or 1.0)


def own_policy(spec: RunSpec) -> Policy:
    """The policy of the framework that the run trained with."""
    return POLICIES[spec.framework]


MOST = 2.0**24  # beyond it a first scale only costs skips
USUAL = POLICIES["torch"].defaults.growth_interval
LEAST = 10  # shorter, and one step in ten is skipped for trying a larger scale
CLEAR_RISE = 2  # powers of two; one is what batches do


@dataclass(frozen=True, slots=True)
class Advice:
    """What to hand to GradScaler; ``reason`` is one sentence for each."""

    initial_scale: float
    growth_interval: int
    scale_reason: str
    interval_reason: str


def skipped_scales(steps: Iterable[StepRecord]) -> list[float]:
    """At which steps were left out for their gradients; a loss that is not finite itself says
    nothing of the scale."""
    return [
        step.scale
        for step in steps
        if step.skipped and step.scale and (step.loss is None or math.isfinite(step.loss))
    ]


def advise(
    windows: Sequence[ScaleWindow], steps_between: float = 1.0, skipped: Iterable[float] = ()
) -> Advice | None:
    """From the windows of a run's steps, in order and so far apart, and the scales at which it
    skipped steps; None without a window, or where it skipped down to where nothing is scaled."""
    lowest_skip = min(skipped, default=math.inf)
    if not windows or lowest_skip <= UNSCALED:
        return None
    ceiling = min(window.high for window in windows)
    floor = max(window.low for window in windows)
    seen = f"output and weight gradients, as far as they were recorded, at {len(windows):,} steps"
    scale = 2.0 ** min(ceiling, math.log2(MOST))
    reason = f"2^{ceiling} is the largest scale that keeps them within fp16 ({seen})"
    if ceiling > math.log2(MOST):
        reason = f"they stay within fp16 up to 2^{ceiling} ({seen}); more than 2^24 gains nothing"
    if scale >= lowest_skip:
        exponent = math.log2(lowest_skip)
        scale = 2.0 ** (math.ceil(exponent) - 1)
        reason = f"this run skipped a step at 2^{round(exponent, 2):g}, and this is below"
    if floor > math.log2(scale):
        reason += f", though some module loses gradients below 2^{floor}"
    rise = windows[-1].high - windows[0].high
    if rise < CLEAR_RISE:
        why = f"the ceiling does not rise, so growing beyond it costs one step in {USUAL:,}"
        return Advice(scale, USUAL, reason, why)
    halves_in = len(windows) * steps_between / rise
    why = f"gradients halve in about {halves_in:,.0f} steps, and the scale should follow them"
    return Advice(scale, min(max(int(halves_in), LEAST), USUAL), reason, why)
