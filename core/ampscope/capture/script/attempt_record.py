"""Puts one :class:`Attempt` together: the backward before it, the gradients, how the step ended."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.script.gradient_facts import GradientFacts
from ampscope.capture.script.optimizer_facts import (
    dtypes,
    lr_of,
    nonfinite_count,
    option_of,
    parameters_of,
    state_facts,
)
from ampscope.observations import Attempt


@dataclass(frozen=True, slots=True)
class Loss:
    """The last backward before the attempt, and how many there were since the one before."""

    value: float | None = None  # unscaled
    dtype: str = ""
    backwards: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How the step ended."""

    scaler: str = ""  # "" when the script called it directly
    scale: float = 1.0
    skipped: bool = False
    unscaled: bool = False  # by the script's own call
    moved_share: float | None = 0.0
    update_norm: float | None = 0.0
    expected: float | None = None  # change of the loss


class Clips:
    """The norms that the script's clips found since the last attempt, before they clipped."""

    def __init__(self) -> None:
        self._found: list[tuple[set[int], float]] = []  # ids of parameters, their norm

    def add(self, parameters: list[Tensor], norm: float, limit: float) -> None:
        """A clip of unscaled gradients by their 2-norm; one that changed nothing is none."""
        if not norm <= limit:
            self._found.append(({id(p) for p in parameters}, norm))

    def take(self, parameters: list[Tensor]) -> float | None:
        """Of an optimizer's gradients all together; None where not all of them were clipped."""
        found, self._found = self._found, []
        clipped: set[int] = set().union(*(ids for ids, _ in found))
        if not found or any(p.grad is not None and id(p) not in clipped for p in parameters):
            return None
        return math.sqrt(sum(norm**2 for _, norm in found))


def attempt_record(
    number: int,
    optimizer: Optimizer,
    name: str,
    loss: Loss,
    facts: GradientFacts,
    ending: Ending,
    unclipped_norm: float | None = None,
    backward_norm: float | None = None,
) -> Attempt:
    """The record of attempt ``number``; ``name`` is the optimizer's."""
    parameters, state = parameters_of(optimizer), state_facts(optimizer)
    return Attempt(
        attempt=number,
        optimizer=name,
        scaler=ending.scaler,
        loss=loss.value,
        loss_dtype=loss.dtype,
        scale=ending.scale,
        skipped=ending.skipped,
        unscaled_before=ending.unscaled,
        backwards=loss.backwards,
        grad_total=facts.total,
        grad_zero=facts.zero,
        grad_nonfinite=facts.nonfinite,
        grad_max=facts.largest,
        grad_norm=facts.norm,
        lr=lr_of(optimizer),
        moved_share=ending.moved_share,
        update_norm=ending.update_norm,
        weight_nonfinite=nonfinite_count(parameters),
        grad_dtypes=dtypes([p.grad for p in parameters if p.grad is not None]),
        weight_dtypes=dtypes(parameters),
        state_dtypes=state.dtypes,
        state_nonfinite=state.nonfinite,
        state_zero_share=state.zero_share,
        eps=option_of(optimizer, "eps"),
        ended_at=time.time(),
        expected_change=ending.expected,
        unclipped_norm=unclipped_norm,
        backward_norm=backward_norm,
    )
