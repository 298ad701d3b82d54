"""One attempted optimizer step from an adapter's facts: the numbers that rules and pages read."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.frameworks.steps import StepFacts
from ampscope.frameworks.tensors import Values
from ampscope.observations import Attempt, ParameterGradient
from ampscope.records import StepRecord

PIECE = 1 << 15  # elements; in fp64 256 KiB, which a core's own cache holds


def gradient_parts(facts: StepFacts) -> list[ParameterGradient]:
    """Every parameter's gradient, unscaled; :func:`attempt_of` fills in the attempt's number."""
    return [
        _part(facts.optimizer, name, order, values, facts.carried)
        for order, (name, values) in enumerate(facts.gradients.items())
    ]


def attempt_of(number: int, facts: StepFacts, parts: list[ParameterGradient]) -> Attempt:
    """The record of attempt ``number``; ``parts`` get that number too."""
    for i, part in enumerate(parts):
        parts[i] = dataclasses.replace(part, attempt=number)
    moved, norm = _motion(facts)
    return Attempt(
        attempt=number,
        optimizer=facts.optimizer,
        scaler="" if facts.scale is None else "scaler0",
        loss=facts.loss,
        loss_dtype=facts.loss_dtype,
        scale=1.0 if facts.scale is None else facts.scale,
        skipped=facts.skipped,
        unscaled_before=facts.unscaled_by_user,
        backwards=facts.backwards,
        grad_total=sum(p.total for p in parts),
        grad_zero=sum(p.zero for p in parts),
        grad_nonfinite=sum(p.nonfinite for p in parts),
        grad_max=_largest(facts, facts.carried),
        grad_norm=math.sqrt(sum((p.norm or 0.0) ** 2 for p in parts)) if parts else None,
        lr=facts.lr,
        moved_share=moved,
        update_norm=norm,
        weight_nonfinite=sum(_nonfinite(v) for v in (facts.after or facts.before).values()),
        grad_dtypes=_dtypes(facts.gradients.values()),
        weight_dtypes=_dtypes((facts.after or facts.before).values()),
        state_dtypes=_dtypes(facts.state.values()),
        state_nonfinite=sum(_nonfinite(v) for v in facts.state.values()),
        state_zero_share=_zero_second_moments(facts),
        eps=facts.eps,
        ended_at=time.time(),
    )


def step_record(attempt: Attempt, facts: StepFacts) -> StepRecord:
    """The same step as pages show it."""
    return StepRecord(
        step=attempt.attempt,
        loss=attempt.loss,
        scale=facts.scale,
        growth_counter=facts.growth_counter,
        skipped=attempt.skipped,
        grad_norm=float("nan") if attempt.grad_nonfinite else attempt.grad_norm,
        lr=attempt.lr,
        step_time_s=facts.step_time_s,
        overhead_s=facts.overhead_s,
        peak_bytes=facts.peak_bytes,
        moved_share=attempt.moved_share,
        ended_at=attempt.ended_at,
    )


def _part(
    optimizer: str, name: str, order: int, values: Values, factor: float
) -> ParameterGradient:
    floats = values.floats()
    bad = _nonfinite(values)
    kept = floats[np.isfinite(floats)] if bad else floats
    norm = math.sqrt(_sum_of_squares(kept, None)) / factor
    zero = values.size - int(np.count_nonzero(floats))
    return ParameterGradient(0, optimizer, name, order, values.size, zero, bad, norm)


def _sum_of_squares(a: NDArray[Any], b: NDArray[Any] | None) -> float:
    """Of ``a``, or of ``a - b``, in fp64; piece by piece, so that it stays in the cache. Not
    linalg.norm, whose threads (BLAS) wait for the framework's own."""
    total = 0.0
    for at in range(0, a.size, PIECE):
        part = a[at : at + PIECE]
        wide = part.astype(np.float64) if b is None else _difference(part, b[at : at + PIECE])
        total += float(np.square(wide, out=wide).sum())
    return total


def _difference(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.subtract(a, b, dtype=np.float64)
    return found


def _largest(facts: StepFacts, factor: float) -> float | None:
    found = []
    for values in facts.gradients.values():
        floats = values.floats()
        kept = floats[np.isfinite(floats)] if _nonfinite(values) else floats
        found.append(float(max(kept.max(), -kept.min())) / factor if kept.size else 0.0)
    return max(found, default=None)


def _motion(facts: StepFacts) -> tuple[float | None, float | None]:
    """(share of weights that the step changed, 2-norm of the change)."""
    if facts.skipped:
        return 0.0, 0.0
    total = moved = 0
    square = 0.0
    for name, after in facts.after.items():
        if name in facts.before:
            before, now = facts.before[name].floats(), after.floats()
            total += after.size
            moved += int(np.count_nonzero(before != now))
            square += _sum_of_squares(now, before)
    return (moved / total, math.sqrt(square)) if total else (None, None)


def _zero_second_moments(facts: StepFacts) -> float | None:
    """Second moments that are zero, where some gradient is not."""
    total = zero = 0
    for name in facts.second_moments:
        floats = facts.state[name].floats()
        total += floats.size
        zero += int((floats == 0).sum())
    flows = any((values.floats() != 0).any() for values in facts.gradients.values())
    return zero / total if total and flows else None


def _nonfinite(values: Values) -> int:
    """How many; the extremes tell in a third of the time where there are none."""
    floats = values.floats()
    if not floats.size or (math.isfinite(floats.min()) and math.isfinite(floats.max())):
        return 0
    return int(values.size - np.isfinite(floats).sum())


def _dtypes(all_values: Iterable[Values]) -> str:
    return "+".join(sorted({values.name for values in all_values}))
