"""One attempted optimizer step from an adapter's facts: the numbers that rules and pages read."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.exponents import NAN, NEG_INF, POS_INF, RAW_LEN
from ampscope.frameworks.array_sums import largest, nonfinite_count, square_sum
from ampscope.frameworks.steps import StepFacts
from ampscope.frameworks.tensors import Values, count_into
from ampscope.observations import Attempt, ParameterGradient
from ampscope.records import NonFiniteRecord, StepRecord


def gradient_parts(facts: StepFacts) -> list[ParameterGradient]:
    """Every parameter's gradient, unscaled; :func:`attempt_of` fills in the attempt's number."""
    return [
        _part(facts.optimizer, name, order, values, facts.carried)
        for order, (name, values) in enumerate(facts.gradients.items())
    ]


def attempt_of(
    number: int,
    facts: StepFacts,
    parts: list[ParameterGradient],
    added: Mapping[str, NDArray[Any]] | None = None,
) -> Attempt:
    """The record of attempt ``number``; ``parts`` get that number too. ``added`` are its
    :func:`updates`, where they are known already."""
    for i, part in enumerate(parts):
        parts[i] = dataclasses.replace(part, attempt=number)
    moved, norm = _motion(facts, updates(facts) if added is None else added)
    return Attempt(
        attempt=number,
        optimizer=facts.optimizer,
        scaler="" if facts.scale is None else facts.scaler,
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


def nonfinite_record(part: ParameterGradient, facts: StepFacts) -> NonFiniteRecord:
    """Of a parameter whose gradient is not finite."""
    row = np.zeros(RAW_LEN, np.int64)
    count_into(facts.gradients[part.name], row)
    counts = int(row[NAN]), int(row[POS_INF]), int(row[NEG_INF])
    return NonFiniteRecord(part.attempt, part.name, part.order, part.total, *counts)


def updates(facts: StepFacts) -> dict[str, NDArray[Any]]:
    """What the step added to each weight; nothing of a skipped one."""
    if facts.skipped:
        return {}
    both = [(name, after) for name, after in facts.after.items() if name in facts.before]
    with np.errstate(over="ignore", invalid="ignore"):
        return {name: after.floats() - facts.before[name].floats() for name, after in both}


def _part(
    optimizer: str, name: str, order: int, values: Values, factor: float
) -> ParameterGradient:
    floats = values.floats()
    bad = nonfinite_count(floats)
    kept = floats[np.isfinite(floats)] if bad else floats
    norm = math.sqrt(square_sum(kept)) / factor
    zero = int(floats.size - np.count_nonzero(floats))
    return ParameterGradient(0, optimizer, name, order, values.size, zero, bad, norm)


def _largest(facts: StepFacts, factor: float) -> float | None:
    found = [largest(values.floats()) / factor for values in facts.gradients.values()]
    return max(found, default=None)


def _motion(
    facts: StepFacts, added: Mapping[str, NDArray[Any]]
) -> tuple[float | None, float | None]:
    """(share of weights that the step changed, 2-norm of the change)."""
    if facts.skipped:
        return 0.0, 0.0
    total = sum(update.size for update in added.values())
    if not total:
        return None, None
    moved = sum(int(np.count_nonzero(update)) for update in added.values())
    return moved / total, math.sqrt(sum(square_sum(update) for update in added.values()))


def _zero_second_moments(facts: StepFacts) -> float | None:
    """Second moments that are zero, where some gradient is not."""
    total = zero = 0
    for name in facts.second_moments:
        floats = facts.state[name].floats()
        total += floats.size
        zero += int(floats.size - np.count_nonzero(floats))
    flows = any(values.floats().any() for values in facts.gradients.values())
    return zero / total if total and flows else None


def _nonfinite(values: Values) -> int:
    return nonfinite_count(values.floats())


def _dtypes(all_values: Iterable[Values]) -> str:
    return "+".join(sorted({values.name for values in all_values}))
