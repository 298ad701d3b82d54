"""Moving averages of weights that half precision holds back.

An average takes a small share of each new weight: ``average += 0.001 * (weight - average)``. In
bf16 such a step is mostly below half the spacing of the numbers, and the average stays as it is.
It shows in two places: in a parameter that no optimizer trains and that ends nearer to its start
than in fp32, and in additions that leave nearly all elements as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.observations import BadOp, Scan

SLOW = 0.5  # less than half as far as in fp32; rounding alone makes no such difference
MIN_STALLS = 5  # updates that moved next to nothing


@dataclass(frozen=True, slots=True)
class SlowAverage:
    """One tensor at the end of a run. Changes are 2-norms over that of its first sight."""

    scan: Scan
    change: float
    reference_change: float  # the same in the fp32 control, never zero


def slow_average(run: RunView, fp32: RunView) -> SlowAverage | None:
    """The first half-precision tensor outside every optimizer that came less than :data:`SLOW` as
    far as in the fp32 control."""
    return next((a for a in _averages(run, fp32) if a.change < SLOW * a.reference_change), None)


def averages_keep_up(run: RunView, fp32: RunView) -> bool:
    """There are half-precision averages, and all came about as far as in fp32: an update that had
    no effect by itself was made up for, as Kahan's compensation and stochastic rounding do."""
    found = _averages(run, fp32)
    return bool(found) and slow_average(run, fp32) is None


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


def stalled_average(run: RunView) -> BadOp | None:
    """The first addition to an average of weights that had no effect :data:`MIN_STALLS` times."""
    stalls = (b for b in run.bad_ops if b.kind == "stall" and b.count >= MIN_STALLS)
    return next(filter(is_average, stalls), None)


def is_average(op: BadOp) -> bool:
    """Weights are involved: the target, or what is added, is a parameter or made of one."""
    return any(o.is_parameter for o in op.inputs)
