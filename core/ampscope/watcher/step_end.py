"""A step that is over: what is known of it at once, and its record when its numbers have come."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ampscope.exponents import NEG_ZERO, POS_ZERO
from ampscope.records import Event, Frame, NonFiniteRecord, Role, StepRecord
from ampscope.watcher.forwards import Forward, Past
from ampscope.watcher.numbers import Norms, Readout


@dataclass(slots=True)
class Ended:
    """One attempted step. ``norms`` is None while they are on their way from the device."""

    step: int
    loss: Tensor | float | None
    scale: float | None
    skipped: bool
    growth_counter: int | None
    lr: float
    step_time_s: float
    overhead_s: float
    peak_bytes: int
    frames: dict[Role, Frame]
    nonfinite: list[NonFiniteRecord]
    events: list[Event]
    readout: Readout | None
    norms: Norms | None
    forwards: list[Forward] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        """Something was not finite, or GradScaler found it so."""
        suspects = self.norms is not None and bool(self.norms.suspects)
        loss = as_number(self.loss)
        return self.skipped or suspects or (loss is not None and not math.isfinite(loss))

    def record(self) -> StepRecord:
        """For the store."""
        norm = None if self.norms is None else self.norms.total / (self.scale or 1.0)
        return StepRecord(
            step=self.step,
            loss=as_number(self.loss),
            scale=self.scale,
            growth_counter=self.growth_counter,
            skipped=self.skipped,
            grad_norm=norm,
            lr=self.lr,
            step_time_s=self.step_time_s,
            overhead_s=self.overhead_s,
            peak_bytes=self.peak_bytes,
            moved_share=moved_share(self.frames.get(Role.UPDATE)),
        )

    def past(self, parameters: int) -> Past:
        """For the ring of the last steps; ``parameters`` in all."""
        norms = np.full(parameters, np.nan)
        if self.norms is not None and self.norms.positions:
            norms[list(self.norms.positions)] = self.norms.values / (self.scale or 1.0)
        return Past(self.step, as_number(self.loss), self.scale, norms)


def as_number(loss: Tensor | float | None) -> float | None:
    """Waits for the device when it is a tensor there."""
    return float(loss) if loss is not None else None


def scale_of(scaler: Any) -> float | None:
    """The loss scale that this step used, asked before ``update``; None without a scaler."""
    return None if scaler is None else float(scaler.get_scale())


def moved_share(updates: Frame | None) -> float | None:
    """Share of the counted weights that moved at all."""
    if updates is None:
        return None
    total = int(updates.rows.sum())
    stayed = int(updates.rows[:, [POS_ZERO, NEG_ZERO]].sum())
    return (total - stayed) / total if total else None
