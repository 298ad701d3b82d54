"""The time before a step, what is read of its gradients, and its record when it is over."""

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
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.training_events import scale_of
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
from ampscope.watcher.flight import Past
from ampscope.watcher.histograms import StepFrames
from ampscope.watcher.numbers import (
    JoinedReadout,
    Norms,
    PendingFlag,
    Readout,
    joined,
    read_numbers,
)
from ampscope.watcher.replay import Replay

MOST_GRADIENTS = 64  # times by hand before a step; the last ones count


@dataclass(frozen=True, slots=True)
class GrowthCounter:
    """Finite steps since the scale last grew or fell, before this step."""

    before: int
    interval: int

    def after(self, *, skipped: bool) -> int:
        """Finite steps since the scale last changed, after this step's ``update``."""
        return 0 if skipped else (self.before + 1) % self.interval


@dataclass(slots=True)
class Present:
    """The time since the last step: what is known before any optimizer's turn."""

    step: int
    loss: Tensor | float | None = None  # of backward passes since gradients were last complete
    is_given: bool = False
    began: float = field(default_factory=time.perf_counter)
    own_s: float = 0.0  # the instruments' own time
    _taken: Tensor | float | None = None
    # The last times that the script took gradients of what was scaled: the numbers of both, of what
    # was scaled first, and how many these are. A loop by hand may never step.
    _gradients: deque[tuple[Readout, int]] = field(
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

    def take_gradients(self, scaled: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The script itself took gradients of what was ``scaled``, for a penalty of their norm or
        for an inner step."""
        read = read_numbers(dict(enumerate([*scaled, *gradients])), self.loss)
        self._gradients.append((read, len(scaled)))

    @property
    def is_search(self) -> bool:
        """Whether such a gradient was not finite while all that it is a gradient of was: the scale
        was too high, and what the loss was computed with is as infinite as any other gradient at
        that scale. Waits for the device where it has to."""
        for read, scaled in self._gradients:
            suspects = read.norms().suspects
            if suspects and suspects[0] >= scaled and is_finite(read.loss):
                return True
        return False

    def drop_losses(self) -> None:
        """The gradients that they led to are gone."""
        if not self.is_given:
            self.loss = None

    def take_loss(self) -> Tensor | float | None:
        """For the optimizer whose gradients are complete; two may share one backward pass."""
        if self.loss is not None:
            self._taken, self.loss, self.is_given = self.loss, None, False
        return self._taken


@dataclass(slots=True)
class Reading:
    """What was read of one optimizer's gradients when they were complete. ``norms`` is None while
    the numbers are on their way from the device."""

    readout: Readout | JoinedReadout
    norms: Norms | None = None
    scale: float | None = None  # the loss scale of this step; None without a scaler
    growth: GrowthCounter | None = None
    events: list[Event] = field(default_factory=list)
    again: Replay | None = None  # the step run again beside fp32, where that was asked for
    clipped_to: float | None = None  # the script's clip since then, by the 2-norm
    is_search: bool = False  # a loss that is not finite is so because the scale was too high
    scaler: Any = None  # whose numbers were not read yet

    def read_scaler(self) -> None:
        """Before it updates its scale, or with the numbers that were on their way: a value read
        afterwards would wait for the whole step. See :func:`scaler_numbers`."""
        scaler, self.scaler = self.scaler, None
        if scaler is None:
            return
        if isinstance(self.readout, Readout) and (known := self.readout.scaler):
            interval = max(1, int(scaler.get_growth_interval()))
            self.scale, self.growth = known[0], GrowthCounter(int(known[1]), interval)
        else:
            self.scale, self.growth = scale_of(scaler), _growth(scaler)

    def run_again(self, result: Replay | str, step: int) -> None:
        """What came of a second run, or why there was none."""
        if isinstance(result, str):
            self.events.append(Event(step, "note", "no reference", result))
        else:
            self.again = result

    @property
    def has_bad_weight(self) -> bool:
        """One of those that were looked at was not finite. Waits for the device."""
        return not all(map(math.isfinite, self.readout.weights))

    @property
    def is_bad(self) -> bool:
        """The loss or a gradient is not finite. Waits for the device where it has to."""
        suspects = self.norms is not None and bool(self.norms.suspects)
        return suspects or self.is_loss_bad

    @property
    def is_loss_bad(self) -> bool:
        """The loss is not finite. Waits for the device where it has to."""
        return not is_finite(self.readout.loss)


@dataclass(frozen=True, slots=True)
class Part:
    """What one optimizer did in a step; most steps have one."""

    optimizer: Optimizer
    reading: Reading
    skipped: bool | PendingFlag
    stalled: float | None = None


def was_skipped(parts: Sequence[Part]) -> bool:
    """Whether one of them left it out. Waits for the device where it has to."""
    return any(_known(part.skipped) for part in parts)


def _known(skipped: bool | PendingFlag) -> bool:
    return skipped.value if isinstance(skipped, PendingFlag) else skipped


def as_one(parts: Sequence[Part]) -> Reading:
    """The readings of all parts: a model may have an optimizer per parameter, and each of them
    steps as soon as backward has reached its parameter."""
    readings = [part.reading for part in parts]
    if len(readings) == 1:
        return readings[0]
    norms = [read.norms for read in readings if read.norms is not None]
    plain = [read.readout for read in readings if isinstance(read.readout, Readout)]
    return Reading(
        JoinedReadout(plain),
        joined(norms) if len(norms) == len(readings) else None,
        readings[0].scale,
        readings[0].growth,
        [event for read in readings for event in read.events],
        is_search=any(read.is_search for read in readings),
    )


@dataclass(frozen=True, slots=True)
class Ended:
    """One step that is over. It holds numbers only, once its frames were read: the recorder may
    keep it waiting."""

    step: int
    reading: Reading
    skipped: bool | PendingFlag  # of a step that is finished it is known
    lr: float | None  # None: it comes with the reading
    step_time_s: float
    overhead_s: float
    peak_bytes: int
    ended_at: float  # seconds since the epoch
    counted: StepFrames
    optimizer: int = 0  # its id
    stalled: float | None = None  # share of half-precision weights that moved in a long span

    @property
    def frames(self) -> dict[Role, Frame]:
        """The step's histograms. Waits for the device where it has to."""
        return self.counted.frames

    @property
    def nonfinite(self) -> list[NonFiniteRecord]:
        """The parameters whose gradients held NaN or Inf. Waits for the device where it has to."""
        return self.counted.nonfinite

    @property
    def has_bad_weight(self) -> bool:
        """One of the weights that were looked at at this step was not finite before it."""
        return self.reading.has_bad_weight

    @property
    def is_bad(self) -> bool:
        """Something was not finite, or GradScaler found it so."""
        return _known(self.skipped) or self.reading.is_bad

    def arrived(self) -> Ended:
        """As it is when the numbers that were on their way have arrived. Waits for the device where
        it has to."""
        read, skipped, frames = self.reading, _known(self.skipped), self.frames
        if read.norms is None:
            read.norms = read.readout.norms()
        read.read_scaler()
        if read.scale is not None:
            for role, frame in frames.items():
                if role.is_gradient:
                    frames[role] = dataclasses.replace(frame, scale=read.scale)
        if skipped:  # it clipped what was thrown away
            read.clipped_to = None
        return dataclasses.replace(self, skipped=skipped)

    def record(self) -> StepRecord:
        """For the store."""
        read, skipped = self.reading, _known(self.skipped)
        lr = read.readout.lr if self.lr is None else self.lr
        norm = None if read.norms is None else read.norms.total / (read.scale or 1.0)
        unclipped = read.readout.unclipped
        if unclipped is not None:
            unclipped /= read.scale or 1.0  # of gradients that were clipped while scaled
        if norm is not None and read.clipped_to is not None and norm > read.clipped_to:
            norm, unclipped = read.clipped_to, norm
        return StepRecord(
            step=self.step,
            loss=read.readout.loss,
            scale=read.scale,
            growth_counter=None if read.growth is None else read.growth.after(skipped=skipped),
            skipped=skipped,
            grad_norm=norm,
            lr=math.nan if lr is None else lr,
            step_time_s=self.step_time_s,
            overhead_s=self.overhead_s,
            peak_bytes=self.peak_bytes,
            moved_share=moved_share(self.frames.get(Role.UPDATE)),
            op_set=None if read.again is None else read.again.ops[0],
            ended_at=self.ended_at,
            unclipped_norm=unclipped,
        )

    def shadows(self) -> list[ShadowRecord]:
        """Half against fp32, where the step was run again."""
        found = [] if self.reading.again is None else self.reading.again.shadows
        return [dataclasses.replace(record, step=self.step) for record in found]

    def ops(self) -> tuple[int, list[OpRecord]]:
        """The ops of the same; none where it was not."""
        return (0, []) if self.reading.again is None else self.reading.again.ops

    def past(self, parameters: int) -> Callable[[], Past]:
        """What makes the entry in the ring of the last steps; ``parameters`` in all."""
        read = self.reading
        return partial(_past, self.step, read.readout.loss, read.scale, parameters, read.norms)


def _past(
    step: int, loss: float | None, scale: float | None, parameters: int, read: Norms | None
) -> Past:
    norms = np.full(parameters, np.nan)
    if read is not None and read.positions:
        norms[list(read.positions)] = read.values / (scale or 1.0)
    return Past(step, loss, scale, norms)


def is_finite(loss: float | None) -> bool:
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


def _growth(scaler: Any) -> GrowthCounter | None:
    with contextlib.suppress(Exception):  # a scaler of another library may count in its own way
        interval = max(1, int(scaler.get_growth_interval()))
        return GrowthCounter(int(scaler._get_growth_tracker()), interval)
    return None
