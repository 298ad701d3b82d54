"""One attempted optimizer step from an adapter's facts: the numbers that rules and pages read."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable

import numpy as np

from ampscope.frameworks.steps import StepFacts
from ampscope.frameworks.tensors import Values
from ampscope.observations import Attempt, ParameterGradient
from ampscope.records import StepRecord


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
    finite = np.isfinite(floats)
    kept = floats if finite.all() else floats[finite]
    # Not linalg.norm: BLAS' threads wait for the framework's own.
    norm = math.sqrt(float(np.square(kept, dtype=np.float64).sum())) / factor
    zero, bad = int((floats == 0).sum()), int(values.size - finite.sum())
    return ParameterGradient(0, optimizer, name, order, values.size, zero, bad, norm)


def _largest(facts: StepFacts, factor: float) -> float | None:
    found = []
    for values in facts.gradients.values():
        floats = values.floats()
        finite = np.isfinite(floats)
        kept = floats if finite.all() else floats[finite]
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
            moved += int((before != now).sum())
            square += float(np.square(np.subtract(now, before, dtype=np.float64)).sum())
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
    return int(values.size - np.isfinite(values.floats()).sum())


def _dtypes(all_values: Iterable[Values]) -> str:
    return "+".join(sorted({values.name for values in all_values}))
