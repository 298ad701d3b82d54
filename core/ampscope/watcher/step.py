"""A watched step: while it is open, its numbers, and its record when it is over.

OpenStep      the time since the last step, before any optimizer's turn
StepNumbers   what an optimizer's gradients, its scaler and its step gave in numbers
ClosedStep    the step that is over, as the recorder gets it
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.failures import wait_for
from ampscope.capture.training_events import scale_of
from ampscope.capture.user_objects import groups_of
from ampscope.capture.weights import moved_share
from ampscope.records import (
    Event,
    Frame,
    NonFiniteRecord,
    OpRecord,
    Role,
    ShadowRecord,
    StepRecord,
)
from ampscope.watcher.flight import StepSummary
from ampscope.watcher.gradient_norms import PendingNorms, start_norms
from ampscope.watcher.histograms import StepFrames
from ampscope.watcher.replay import StepReplay

MOST_GRADIENTS = 64  # times by hand before a step; the last ones count


@dataclass(slots=True)
class OpenStep:
    """The time since the last step: what is known before any optimizer's turn."""

    step: int
    loss: Tensor | float | None = None  # of backward passes since gradients were last complete
    is_given: bool = False
    began: float = field(default_factory=time.perf_counter)
    own_s: float = 0.0  # the instruments' own time
    is_late: bool = False  # gradients are read behind the optimizer's step, which has a closure
    has_weights: bool = False  # some were looked at
    _taken: Tensor | float | None = None
    # The last times that the script took gradients of what was scaled: the numbers of both, of what
    # was scaled first, and how many these are. A loop by hand may never step.
    _gradients: deque[tuple[PendingNorms, int]] = field(
        default_factory=lambda: deque(maxlen=MOST_GRADIENTS)
    )

    def see(self, loss: Tensor) -> None:
        """A loss that backward begins at. Micro-batches add up, as their gradients do."""
        if not self.is_given:
            self.loss = loss if self.loss is None else self.loss + loss

    def give(self, loss: Any) -> None:
        """The loss as the caller says: it counts more than what is seen."""
        self.loss = loss.detach() if isinstance(loss, Tensor) else float(loss)
        self.is_given = True

    def drop_losses(self) -> None:
        """The gradients that they led to are gone."""
        if not self.is_given:
            self.loss = None

    def take_loss(self) -> Tensor | float | None:
        """For the optimizer whose gradients are complete; two may share one backward pass."""
        if self.loss is not None:
            self._taken, self.loss, self.is_given = self.loss, None, False
        return self._taken

    def take_gradients(self, scaled: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The script itself took gradients of what was ``scaled``, for a penalty of their norm or
        for an inner step."""
        read = start_norms(dict(enumerate([*scaled, *gradients])), self.loss)
        self._gradients.append((read, len(scaled)))

    @property
    def is_search(self) -> bool:
        """Whether such a gradient was not finite while all that it is a gradient of was: the scale
        was too high, and what the loss was computed with is as infinite as any other gradient at
        that scale. Waits for the device where it has to."""
        return any(
            bool(read.suspects) and read.suspects[0] >= scaled and _is_finite(read.loss)
            for read, scaled in self._gradients
        )


class PendingFlag:
    """Whether an optimizer left out its step, on its way from the device."""

    def __init__(self, found: Tensor) -> None:
        """``found``: one number, which is not zero where the step was left out."""
        self._copy = found.detach().reshape(()).to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if not found.is_cpu:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record(torch.cuda.current_stream(found.device))

    def __bool__(self) -> bool:
        """Waits for the device where it has to."""
        if self._event is not None:
            wait_for(self._event)
        return bool(self._copy)


@dataclass(slots=True)
class StepNumbers:
    """What one optimizer's step gave in numbers, or what several that stepped in one backward pass
    did, see :meth:`joined`. What is still on its way from a device is waited for where it is asked
    for."""

    pending: tuple[PendingNorms, ...]  # of each optimizer
    scaler: Any = None  # whose numbers were not read yet
    is_judged: bool = (
        False  # read, and a bad step was kept; False while numbers may be on their way
    )
    scale: float | None = None  # the loss scale of this step; None without a scaler
    # Finite steps since the scale last grew or fell, before this step, and how many let it grow.
    growth: tuple[int, int] | None = None
    events: list[Event] = field(default_factory=list)
    again: StepReplay | None = None  # the step run again beside fp32, where that was asked for
    clipped_to: float | None = None  # the script's clip since then, by the 2-norm
    is_search: bool = False  # a loss that is not finite is so because the scale was too high
    skipped: bool | PendingFlag = False  # the optimizer left out its step
    stalled: float | None = None  # share of half-precision weights that moved in a long span

    @classmethod
    def joined(cls, parts: Sequence[StepNumbers]) -> StepNumbers:
        """Those of all parts as one: a model may have an optimizer per parameter, and each of them
        steps as soon as backward has reached its parameter. Waits for flags of theirs."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            tuple(pending for part in parts for pending in part.pending),
            is_judged=all(part.is_judged for part in parts),
            scale=parts[0].scale,
            growth=parts[0].growth,
            events=[event for part in parts for event in part.events],
            is_search=any(part.is_search for part in parts),
            skipped=any(part.skipped for part in parts),
            stalled=min((p.stalled for p in parts if p.stalled is not None), default=None),
        )

    @property
    def loss(self) -> float | None:
        """None where there was none. All optimizers have that of the one backward pass."""
        return self.pending[0].loss

    @property
    def lr(self) -> float | None:
        """The first optimizer's learning rate, where that came from a device."""
        return self.pending[0].lr

    @property
    def unclipped(self) -> float | None:
        """The norm before the training's own clip; None where that changed nothing, and of several
        optimizers, each of which saw a part of the gradients."""
        return self.pending[0].unclipped if len(self.pending) == 1 else None

    @property
    def norm(self) -> float:
        """The 2-norm of all gradients together."""
        values = [value for part in self.pending for value in part.values.tolist()]
        total = math.hypot(*values)
        return math.nan if total == math.inf and any(map(math.isnan, values)) else total

    @property
    def norms(self) -> tuple[list[int], NDArray[np.float64]]:
        """Positions of parameters, and the norms of their gradients."""
        positions = [position for part in self.pending for position in part.positions]
        return positions, np.concatenate([part.values for part in self.pending])

    @property
    def suspects(self) -> list[int]:
        """Positions of the parameters whose norm is not finite."""
        return [position for part in self.pending for position in part.suspects]

    @property
    def has_bad_weight(self) -> bool:
        """One of those that were looked at was not finite."""
        return not all(math.isfinite(norm) for part in self.pending for norm in part.weights)

    @property
    def is_loss_bad(self) -> bool:
        """The loss is not finite."""
        return not _is_finite(self.loss)

    @property
    def is_bad(self) -> bool:
        """The loss or a gradient is not finite."""
        return any(part.suspects for part in self.pending) or self.is_loss_bad

    def read_scaler(self) -> None:
        """Before it updates its scale, or with the numbers that were on their way: a value read
        afterwards would wait for the whole step. See :func:`scaler_numbers`."""
        scaler, self.scaler = self.scaler, None
        if scaler is None:
            return
        if known := self.pending[0].scaler:
            self.scale = known[0]
            self.growth = int(known[1]), max(1, int(scaler.get_growth_interval()))
        else:
            self.scale, self.growth = scale_of(scaler), _growth(scaler)

    def run_again(self, result: StepReplay | str, step: int) -> None:
        """What came of a second run, or why there was none."""
        if isinstance(result, str):
            self.events.append(Event(step, "note", "no reference", result))
        else:
            self.again = result


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """One step that is over. It holds numbers only, once its frames were read: the recorder may
    keep it waiting. What is on its way from a device is waited for where it is asked for."""

    step: int
    numbers: StepNumbers
    lr: float | None  # None: it comes with the numbers
    step_time_s: float
    overhead_s: float
    peak_bytes: int
    ended_at: float  # seconds since the epoch
    counted: StepFrames
    optimizer: int = 0  # its id

    @property
    def frames(self) -> dict[Role, Frame]:
        """The step's histograms."""
        return self.counted.frames

    @property
    def nonfinite(self) -> list[NonFiniteRecord]:
        """The parameters whose gradients held NaN or Inf."""
        return self.counted.nonfinite

    @property
    def is_bad(self) -> bool:
        """Something was not finite, or GradScaler found it so."""
        return bool(self.numbers.skipped) or self.numbers.is_bad

    def arrive(self) -> None:
        """Wait for the numbers that are on their way, and for the histograms."""
        numbers = self.numbers
        numbers.skipped = bool(numbers.skipped)
        frames = self.frames
        numbers.read_scaler()
        if numbers.scale is not None:
            for role, frame in frames.items():
                if role.is_gradient:
                    frames[role] = dataclasses.replace(frame, scale=numbers.scale)
        if numbers.skipped:  # it clipped what was thrown away
            numbers.clipped_to = None

    def record(self) -> StepRecord:
        """For the store."""
        numbers, skipped, counter = self.numbers, bool(self.numbers.skipped), None
        if numbers.growth is not None:
            before, interval = numbers.growth
            counter = 0 if skipped else (before + 1) % interval
        lr = numbers.lr if self.lr is None else self.lr
        norm = numbers.norm / (numbers.scale or 1.0)
        unclipped = numbers.unclipped
        if unclipped is not None:
            unclipped /= numbers.scale or 1.0  # of gradients that were clipped while scaled
        if numbers.clipped_to is not None and norm > numbers.clipped_to:
            norm, unclipped = numbers.clipped_to, norm
        return StepRecord(
            step=self.step,
            loss=numbers.loss,
            scale=numbers.scale,
            growth_counter=counter,
            skipped=skipped,
            grad_norm=norm,
            lr=math.nan if lr is None else lr,
            step_time_s=self.step_time_s,
            overhead_s=self.overhead_s,
            peak_bytes=self.peak_bytes,
            moved_share=moved_share(self.frames.get(Role.UPDATE)),
            op_set=None if numbers.again is None else numbers.again.ops[0],
            ended_at=self.ended_at,
            unclipped_norm=unclipped,
        )

    def shadows(self) -> list[ShadowRecord]:
        """Half against fp32, where the step was run again."""
        found = [] if self.numbers.again is None else self.numbers.again.shadows
        return [dataclasses.replace(record, step=self.step) for record in found]

    def ops(self) -> tuple[int, list[OpRecord]]:
        """The ops of the same; none where it was not."""
        return (0, []) if self.numbers.again is None else self.numbers.again.ops

    def summary(self, parameters: int) -> Callable[[], StepSummary]:
        """What makes the entry in the ring of the last steps; ``parameters`` in all."""
        numbers = self.numbers
        known = self.step, numbers.loss, numbers.scale
        return partial(_summary, known, parameters, *numbers.norms)


def _summary(
    known: tuple[int, float | None, float | None],
    parameters: int,
    positions: list[int],
    values: NDArray[np.float64],
) -> StepSummary:
    norms = np.full(parameters, np.nan)
    norms[positions] = values / (known[2] or 1.0)
    return StepSummary(*known, norms)


def _is_finite(loss: float | None) -> bool:
    """None, where there was no loss, is."""
    return loss is None or math.isfinite(loss)


def scaler_numbers(scaler: Any) -> list[Tensor]:
    """The scale and the growth counter of torch's own GradScaler on a device: read with the norms,
    they cost no wait of their own. Nothing of any other, whose methods are asked."""
    base = torch.amp.GradScaler
    kind = type(scaler)
    if (
        not isinstance(scaler, base)
        or kind.get_scale is not base.get_scale
        or kind._get_growth_tracker is not base._get_growth_tracker
    ):
        return []
    found = [scaler._get_scale_async(), scaler._growth_tracker]
    return [t for t in found if t is not None] if all(map(_is_on_device, found)) else []


def _is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_cpu and value.numel() == 1


def lr_on_device(optimizer: Optimizer) -> Tensor | None:
    """Its first group's learning rate, where that is a number on a device (a capturable one)."""
    groups = groups_of(optimizer)
    rate = groups[0].get("lr") if groups else None
    return rate if isinstance(rate, Tensor) and not rate.is_cpu and rate.numel() == 1 else None


def _growth(scaler: Any) -> tuple[int, int] | None:
    with contextlib.suppress(Exception):  # a scaler of another library may count in its own way
        interval = max(1, int(scaler.get_growth_interval()))
        return int(scaler._get_growth_tracker()), interval
    return None
