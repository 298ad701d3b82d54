"""What a watched training goes through, step by step: instruments, decisions, records.

    loss           seen at scaler.scale or at backward
    gradients      complete, still scaled: norms at every step; histograms when they are due;
                   when they are not finite: who holds it, and a capsule where it is no calibration
    optimizer      steps, or is skipped
    end            the step's record goes to the recorder; alarms; the schedule of the next step

On CUDA without a scaler nothing waits for the norms: a step is finished while the next one runs.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._mode_utils import no_dispatch

from ampscope.capture.script.optimizer_facts import lr_of
from ampscope.records import Event, Role, State
from ampscope.run.device import peak_bytes
from ampscope.watcher import announcements
from ampscope.watcher.alarms import Alarms
from ampscope.watcher.bad_steps import BadSteps
from ampscope.watcher.flight import FlightRecorder
from ampscope.watcher.histograms import StepHistograms
from ampscope.watcher.keeper import Keeper
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.numbers import Norms, Readout, checked, read_norms
from ampscope.watcher.our_optimizers import OurOptimizers
from ampscope.watcher.ranks import Place
from ampscope.watcher.recorder import Recorder
from ampscope.watcher.schedule import Schedule
from ampscope.watcher.step_end import Ended, as_number, scale_of
from ampscope.watcher.step_hooks import StepHooks
from ampscope.watcher.telling import Settings, Telling


class Session:
    """One watched training; a listener of its steps."""

    _loss: Tensor | float | None  # of the present step
    _readout: Readout | None
    _norms: Norms | None
    _events: list[Event]

    def __init__(
        self, models: WatchedModels, optimizers: list[Optimizer], scaler: Any,
        path: Path, place: Place, settings: Settings,
    ) -> None:  # fmt: skip
        self.step = 0
        self.schedule = Schedule(settings.every)
        self._models, self.place = models, place
        self._device = models.parameters[0].tensor.device
        spec, machine = announcements.run_of(models, place, settings, self._device)
        self.recorder = Recorder(path, spec, machine)
        self.telling = Telling(settings, lambda: self.recorder.is_cancelled)
        self._histograms = StepHistograms(models)
        self._flight = FlightRecorder(models)
        self.keeper = Keeper(models, self._flight.past, self.recorder.path, settings.limits)
        self.bad = BadSteps(
            models, self._histograms, self._flight, self.keeper, self.recorder, place,
            machine.policy, settings,
        )  # fmt: skip
        self._optimizers = OurOptimizers(models, optimizers)
        self._hooks = StepHooks(self, self._optimizers.has, scaler)
        self._alarms = Alarms(settings.bounds)
        self._stack = contextlib.ExitStack()
        self._late: Ended | None = None

    def open(self) -> None:
        """Everything on."""
        self.recorder.modules(self._models.records())
        for note in announcements.notes(self._models, self.place):
            self.recorder.event(note)
        self._stack.enter_context(self._histograms)
        self._stack.enter_context(self._flight)
        if self.bad.sentinel is not None:
            self._stack.enter_context(self.bad.sentinel)
        self._stack.enter_context(self._hooks)
        self._begin()

    def close(self, state: State, message: str) -> None:
        """Everything off; again does nothing."""
        self._stack.close()
        self._finish_late()
        self.recorder.close(state, message)

    def loss_given(self, value: Any) -> None:
        """By the caller: it counts more than what is seen."""
        self._loss = value.detach() if isinstance(value, Tensor) else float(value)
        self._loss_is_given = True

    def loss_seen(self, loss: Tensor) -> None:
        """By the hooks, before a backward. Micro-batches add up, as their gradients do."""
        if not self._loss_is_given and loss.numel() == 1:
            self._loss = loss if self._loss is None else self._loss + loss

    def gradients_complete(self, optimizer: Optimizer, scaler: Any) -> None:
        """Backward is done; gradients are still scaled and the weights are as they were."""
        started = time.perf_counter()
        gradients = self._optimizers.gradients(optimizer)
        with no_dispatch():
            self._readout = read_norms(list(gradients.items()))
        self._histograms.gradients_complete(optimizer)
        if scaler is not None or self._readout.is_immediate:  # GradScaler waits here as it is
            with no_dispatch():
                self._norms = checked(self._readout.norms(), gradients)
            loss = self._loss = as_number(self._loss)
            if self._norms.suspects or (loss is not None and not math.isfinite(loss)):
                self._histograms.count_bad(optimizer)
                held, scale = self._flight.forwards, scale_of(scaler)
                self._events += self.bad.examine(self.step, loss, scale, held, is_late=False)
        self._own_s += time.perf_counter() - started

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        self._histograms.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        self._histograms.after_step(optimizer)

    def attempt_ended(self, optimizer: Optimizer, scaler: Any, *, skipped: bool) -> None:
        """The step is over, taken or skipped."""
        started = time.perf_counter()
        ended = self._ended(optimizer, scaler, skipped=skipped)
        self._optimizers.stepped(optimizer)
        self._flight.drop(self._optimizers.models(optimizer))
        self.bad.end_step()
        self._finish_late()
        alarms = []
        if ended.norms is None and ended.readout is not None:
            self._late = ended
        else:
            alarms = self._finish(ended)
        self.step += 1
        self._begin()
        self._own_s += time.perf_counter() - started
        self.telling.tell(alarms)

    def _ended(self, optimizer: Optimizer, scaler: Any, *, skipped: bool) -> Ended:
        now = time.perf_counter()
        own_s = self._own_s + self._histograms.take_elapsed_s() + self._flight.take_elapsed_s()
        scale = scale_of(scaler)
        frames, nonfinite = self._histograms.take(scale or 1.0)
        return Ended(
            step=self.step,
            loss=self._loss,
            scale=scale,
            skipped=skipped,
            growth_counter=announcements.growth_counter(scaler, skipped=skipped),
            lr=lr_of(optimizer),
            step_time_s=max(now - self._ended_at - own_s, 0.0),
            overhead_s=own_s,
            peak_bytes=peak_bytes(self._device),
            frames=frames,
            nonfinite=nonfinite,
            events=self._events,
            readout=self._readout,
            norms=self._norms,
            forwards=list(self._flight.forwards),
        )

    def _finish_late(self) -> None:
        """The step before, whose numbers have had a whole step's time to arrive."""
        ended, self._late = self._late, None
        if ended is None or ended.readout is None:
            return
        ended.norms = ended.readout.norms()
        if ended.is_bad:
            loss = as_number(ended.loss)
            ended.events += self.bad.examine(ended.step, loss, None, ended.forwards, is_late=True)
        self.telling.tell(self._finish(ended))

    def _finish(self, ended: Ended) -> list[Event]:
        """Record the step; returns its alarms."""
        record = ended.record()
        if not ended.is_bad:
            self.bad.good()
        if self.schedule.saw(self.step, bad=ended.is_bad):
            ended.events.append(announcements.tightened(ended.step))
        alarms = self._alarms.check(record, ended.frames.get(Role.WEIGHT_GRAD))
        self.telling.told += alarms
        events = [*ended.events, *alarms]
        self.recorder.step(record, list(ended.frames.values()), ended.nonfinite, events)
        self._flight.past.append(ended.past(len(self._models.parameters)))
        return alarms

    def _begin(self) -> None:
        self._loss, self._loss_is_given = None, False
        self._readout, self._norms, self._events = None, None, []
        detail = self.schedule.detail(self.step, self._optimizers.round_of(self.step))
        self._histograms.start(self.step, detail)
        self._ended_at, self._own_s = time.perf_counter(), 0.0
