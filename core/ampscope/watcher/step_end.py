"""The step in progress, the step that is over, and its record when its numbers have come."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ampscope.exponents import NEG_ZERO, POS_ZERO
from ampscope.records import (
    Event,
    Frame,
    NonFiniteRecord,
    OpRecord,
    Role,
    ShadowRecord,
    StepRecord,
)
from ampscope.watcher.forwards import Forward, Past
from ampscope.watcher.numbers import Norms, Readout
from ampscope.watcher.replay import Replay


@dataclass(frozen=True, slots=True)
class GrowthCounter:
    """Finite steps since the scale last grew or fell, before this step."""

    before: int
    interval: int

    def after(self, *, skipped: bool) -> int:
        """The same after this step's ``update``."""
        return 0 if skipped else (self.before + 1) % self.interval


@dataclass(slots=True)
class Present:
    """The step in progress. ``norms`` is None before they are read from the device."""

    step: int
    loss: Tensor | float | None = None
    loss_is_given: bool = False
    readout: Readout | None = None
    norms: Norms | None = None
    scale: float | None = None  # the loss scale of this step; None without a scaler
    growth: GrowthCounter | None = None
    events: list[Event] = field(default_factory=list)
    again: Replay | None = None  # run again beside fp32, where that was asked for
    began: float = field(default_factory=time.perf_counter)
    own_s: float = 0.0  # the instruments' own time

    def see(self, loss: Tensor) -> None:
        """A loss that backward begins at. Micro-batches add up, as their gradients do."""
        if not self.loss_is_given and loss.numel() == 1:
            self.loss = loss if self.loss is None else self.loss + loss

    def give(self, loss: Any) -> None:
        """The loss as the caller says: it counts more than what is seen."""
        self.loss = loss.detach() if isinstance(loss, Tensor) else float(loss)
        self.loss_is_given = True

    def read_scaler(self, scaler: Any) -> None:
        """Before the optimizer steps, when GradScaler waits for the device as it is: a value read
        afterwards would wait for the whole step."""
        if scaler is not None:
            self.scale, self.growth = float(scaler.get_scale()), _growth(scaler)

    def run_again(self, result: Replay | str) -> None:
        """What came of a second run, or why there was none."""
        if isinstance(result, str):
            self.events.append(Event(self.step, "note", "no reference", result))
        else:
            self.again = result

    @property
    def is_bad(self) -> bool:
        """The loss or a gradient is not finite. Waits for the device when the loss is there."""
        self.loss = loss = as_number(self.loss)
        suspects = self.norms is not None and bool(self.norms.suspects)
        return suspects or (loss is not None and not math.isfinite(loss))


@dataclass(frozen=True, slots=True)
class Ended:
    """One attempted step that is over."""

    now: Present
    skipped: bool
    lr: float
    step_time_s: float
    peak_bytes: int
    frames: dict[Role, Frame]
    nonfinite: list[NonFiniteRecord]
    forwards: list[Forward]

    @property
    def is_bad(self) -> bool:
        """Something was not finite, or GradScaler found it so."""
        return self.skipped or self.now.is_bad

    def record(self) -> StepRecord:
        """For the store."""
        now = self.now
        norm = None if now.norms is None else now.norms.total / (now.scale or 1.0)
        return StepRecord(
            step=now.step,
            loss=as_number(now.loss),
            scale=now.scale,
            growth_counter=None if now.growth is None else now.growth.after(skipped=self.skipped),
            skipped=self.skipped,
            grad_norm=norm,
            lr=self.lr,
            step_time_s=self.step_time_s,
            overhead_s=now.own_s,
            peak_bytes=self.peak_bytes,
            moved_share=moved_share(self.frames.get(Role.UPDATE)),
            op_set=None if now.again is None else now.again.ops[0],
        )

    def shadows(self) -> list[ShadowRecord]:
        """Half against fp32, where the step was run again."""
        found = [] if self.now.again is None else self.now.again.shadows
        return [dataclasses.replace(record, step=self.now.step) for record in found]

    def ops(self) -> tuple[int, list[OpRecord]]:
        """The ops of the same; none where it was not."""
        return (0, []) if self.now.again is None else self.now.again.ops

    def past(self, parameters: int) -> Past:
        """For the ring of the last steps; ``parameters`` in all."""
        norms, read = np.full(parameters, np.nan), self.now.norms
        if read is not None and read.positions:
            norms[list(read.positions)] = read.values / (self.now.scale or 1.0)
        return Past(self.now.step, as_number(self.now.loss), self.now.scale, norms)


def as_number(loss: Tensor | float | None) -> float | None:
    """Waits for the device when it is a tensor there."""
    return float(loss) if loss is not None else None


def _growth(scaler: Any) -> GrowthCounter | None:
    with contextlib.suppress(Exception):  # a scaler of another library may count in its own way
        interval = max(1, int(scaler.get_growth_interval()))
        return GrowthCounter(int(scaler._get_growth_tracker()), interval)
    return None


def moved_share(updates: Frame | None) -> float | None:
    """Share of the counted weights that moved at all."""
    if updates is None:
        return None
    total = int(updates.rows.sum())
    stayed = int(updates.rows[:, [POS_ZERO, NEG_ZERO]].sum())
    return (total - stayed) / total if total else None
