"""Half-precision tensors that a model keeps, beside those of the fp32 control: weights that updates
no longer move, averages of weights that stand still, and tables that were computed too coarsely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.numerics.formats import FORMATS
from ampscope.observations import Scan

NEARLY_ALL = 0.9  # of the steps; before the first one no weight needs to be rounded
KEPT = 0.5  # of the way that fp32's weights went
STANDS = 0.3  # of the weights that fp32 moves; rounding that keeps the mean leaves less than 0.05
SLOW = 0.5  # less than half as far as in fp32; rounding alone makes no such difference
KEEPS_UP = 0.9  # of fp32's way; compensated and stochastically rounded averages come 0.99 as far
INACCURATE_SPREAD = 0.05  # one rounding to bf16 is at most 0.4 % of a value


@dataclass(frozen=True, slots=True)
class Moved:
    """Shares of one optimizer's weights that its median step changed."""

    optimizer: str
    own: float
    reference: float  # in the fp32 control


def least_moved(run: RunView, fp32: RunView) -> Moved | None:
    """The optimizer whose steps move the fewest weights beside those of the fp32 control. Taken by
    optimizer: one of an embedding moves few weights in every run."""
    pairs = [
        Moved(name, own, fp32.moved_shares[name])
        for name, own in run.moved_shares.items()
        if fp32.moved_shares.get(name)
    ]
    return min(pairs, key=lambda pair: pair.own / pair.reference, default=None)


def half_weights(run: RunView) -> str:
    """Dtypes of the weights that the run's taken steps update, when half precision is among them
    and a gradient arrived; else ""."""
    taken = [a for a in run.steps if not a.skipped]
    half = [a for a in taken if "fp16" in a.weight_dtypes or "bf16" in a.weight_dtypes]
    return half[0].weight_dtypes if half and any(a.grad_norm for a in half) else ""


def rounded_weights(run: RunView) -> str:
    """The half format to whose values the script rounds fp32 weights between its steps, so that it
    holds all of them before nearly every step; else "". Masters that were made of half weights are
    held as well for as long as gradients of zero leave them where they began: no rounding does."""
    taken = (a for a in run.steps if not a.skipped)
    held = [a.held_in for a in taken if not a.grad_total or a.grad_zero < a.grad_total]
    found = max(set(held), key=held.count, default="")
    return found if found and held.count(found) >= NEARLY_ALL * len(held) else ""


def kept_descent(run: RunView, fp32: RunView, optimizer: str) -> float | None:
    """How far one optimizer's steps led down their gradients, as a share of what they did in fp32:
    sums of gradient times update over the steps that both runs took. None where a run recorded
    none, or fp32's steps lead up. Where the loss stays higher than in fp32 the gradients stay
    larger, so the share is rather too large."""
    taken = [
        {
            a.step: a.expected_change
            for a in view.steps
            if a.optimizer == optimizer and not a.skipped
        }
        for view in (run, fp32)
    ]
    pairs = [(own, taken[1].get(step)) for step, own in taken[0].items()]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    own, full = (math.fsum(part) for part in zip(*known, strict=True)) if known else (0.0, 0.0)
    return own / full if full < 0 and math.isfinite(own) else None


def was_cast(run: RunView) -> bool:
    """Whether weights became half after the run had begun: their way over the run is then mostly
    that of the steps before."""
    first = {s.name: s.dtype for s in run.scans if s.moment == "start"}
    ends = ((s, first.get(s.name, s.dtype)) for s in run.scans_of("end", "parameter"))
    return any(s.dtype in ("fp16", "bf16") and before == "fp32" for s, before in ends)


def kept_motion(run: RunView, fp32: RunView, kind: str = "parameter") -> float | None:
    """How far half-precision tensors of one ``kind`` came over the whole run, as a share of the way
    in fp32; None when no displacements of the same tensors were recorded.

    Many steps may each move few weights and still lose nothing: stochastic rounding moves one
    weight in ten by ten times the update, Kahan's compensation moves each at every tenth step. So
    displacements at the same places are projected on the direction that fp32 took:
    sum(d * sign(d32)) / sum(abs(d32)). It is 1 where rounding keeps the mean, whatever its noise,
    and 0 where updates are rounded away.
    """
    reference = {s.name: s for s in fp32.scans_of("end", kind)}
    formats = {"fp16", "bf16"} | ({"fp32"} if rounded_weights(run) else set())
    along = length = 0.0
    for scan in run.scans_of("end", kind):
        other = reference.get(scan.name)
        if other is None or scan.dtype not in formats:
            continue
        if not scan.displacement or len(scan.displacement) != len(other.displacement):
            continue
        for own, full in zip(scan.displacement, other.displacement, strict=True):
            if math.isfinite(own) and math.isfinite(full):
                along += math.copysign(own, own * full) if full else 0.0
                length += abs(full)
    return along / length if length else None


def standing_share(run: RunView, fp32: RunView) -> float | None:
    """Of the weights that the fp32 control's run moves, the share that stand at the end of this one
    where they began; None where that was not recorded, or fp32 moves none."""
    reference = {s.name: s for s in fp32.scans_of("end", "parameter") if s.still is not None}
    pairs = [
        (own.total, own.still, reference[own.name].still or 0.0)
        for own in run.scans_of("end", "parameter")
        if own.still is not None and own.name in reference
    ]
    moves = math.fsum(total * (1 - still) for total, _, still in pairs)
    moved = math.fsum(total * (1 - still) for total, still, _ in pairs)
    return 1 - moved / moves if moves else None


@dataclass(frozen=True, slots=True)
class SlowAverage:
    """A moving average of weights at the end of a run. Changes are 2-norms over that of its first
    sight.

    An average takes a small share of each new weight: ``average += 0.001 * (weight - average)``. In
    bf16 such a step is mostly below half the spacing of the numbers, and the average stays as it
    is. It shows in a parameter that no optimizer trains and that ends nearer to its start than in
    fp32; and in additions that leave nearly all elements as they are
    (:func:`ampscope.analysis.half_sums.stagnated_average`).
    """

    scan: Scan
    change: float
    reference_change: float  # the same in the fp32 control, never zero


def slow_average(run: RunView, fp32: RunView) -> SlowAverage | None:
    """The first half-precision tensor outside every optimizer that came less than :data:`SLOW` as
    far as in the fp32 control. A move below the spacing of its numbers says nothing: a rounded copy
    of the weights, made from fp32 ones at each step, may stand still then, too."""
    for found in _averages(run, fp32):
        spacing = 2.0 ** -(FORMATS[found.scan.dtype].mantissa_bits + 1)  # the least, relative
        if spacing / 2 < found.reference_change and found.change < SLOW * found.reference_change:
            return found
    return None


def averages_keep_up(run: RunView, fp32: RunView) -> bool:
    """There are half-precision averages, and they came as far as in fp32: an update that had no
    effect by itself was made up for, as Kahan's compensation and stochastic rounding do.

    An average that follows until the distance is too small for its format comes far, too, but not
    as far: 0.4 to 0.7 of fp32's way, where weights move by a fifth of themselves.
    """
    found = _averages(run, fp32)
    if not found or slow_average(run, fp32) is not None:
        return False
    kept = kept_motion(run, fp32, "frozen")
    if kept is None:
        kept = min(a.change / a.reference_change for a in found)
    share_of_steps = len(run.steps) / max(1, len(fp32.steps))  # a watch ends by the clock
    return kept >= KEEPS_UP * min(1.0, share_of_steps)


def _averages(run: RunView, fp32: RunView) -> list[SlowAverage]:
    """Half-precision tensors outside every optimizer that move in fp32."""
    end = {s.name: s for s in fp32.scans_of("end", "frozen") + fp32.scans_of("end", "buffer")}
    return [
        SlowAverage(scan, scan.change or 0.0, other.change)
        for scan in run.scans_of("end", "frozen")
        if scan.dtype in ("fp16", "bf16")
        and (other := end.get(scan.name)) is not None
        and other.change
    ]


@dataclass(frozen=True, slots=True)
class InaccurateTable:
    """A buffer that the model computed once and keeps, and how far it is from the fp32 control's:
    largest difference over the spread."""

    scan: Scan
    error: float


def inaccurate_table(run: RunView, fp32: RunView) -> InaccurateTable | None:
    """The first buffer that was built in another dtype than fp32 and differs from the control's by
    more than :data:`INACCURATE_SPREAD`."""
    tables = {s.name: s for s in _built(fp32)}
    for scan in _built(run):
        reference = tables.get(scan.name)
        if reference is None or scan.dtype == "fp32":
            continue
        error = _distance(scan.sample, reference.sample)
        if error is not None and error > INACCURATE_SPREAD:
            return InaccurateTable(scan, error)
    return None


def owner_of_only_table(run: RunView) -> str:
    """Path of the module that owns the half buffers of the model, when it is a single one; else "".

    A table is mostly built in a constructor, where no module runs that could be named.
    """
    names = {scan.name.rpartition(".")[0] for scan in _built(run) if scan.dtype in ("fp16", "bf16")}
    return names.pop() if len(names) == 1 else ""


def _built(run: RunView) -> list[Scan]:
    """Buffers as they were before the first step that was recorded. One that is seen first after
    it, as of a half copy that is validated, may hold what a training made of it, and differ from
    run to run."""
    first = run.steps[0].step if run.steps else 0
    return [s for s in run.scans_of("start", "buffer") if s.step <= first]


def _distance(values: tuple[float, ...], reference: tuple[float, ...]) -> float | None:
    """None when the samples cannot be compared: of different lengths, or all values the same."""
    if len(values) != len(reference) or not values:
        return None
    spread = max(reference) - min(reference)
    largest = max(abs(a - b) for a, b in zip(values, reference, strict=True))
    return largest / spread if spread else None
