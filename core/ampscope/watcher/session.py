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
from ampscope.watcher.numbers import checked, read_norms
from ampscope.watcher.our_optimizers import OurOptimizers
from ampscope.watcher.ranks import Place
from ampscope.watcher.recorder import Recorder
from ampscope.watcher.schedule import Schedule
from ampscope.watcher.step_end import Ended, Present, as_number
from ampscope.watcher.step_hooks import StepHooks
from ampscope.watcher.telling import Settings, Telling


class Session:
    """One watched training; a listener of its steps."""

    def __init__(
        self, models: WatchedModels, optimizers: list[Optimizer], scaler: Any,
        path: Path, place: Place, settings: Settings,
    ) -> None:  # fmt: skip
        self.referenced: set[int] = set()  # steps to run again beside fp32
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
        self._begin(0)

    def close(self, state: State, message: str) -> None:
        """Everything off; again does nothing."""
        self._stack.close()
        self._finish_late()
        self.recorder.close(state, message)

    def loss_seen(self, loss: Tensor) -> None:
        """By the hooks, before a backward."""
        self.now.see(loss)

    def gradients_complete(self, optimizer: Optimizer, scaler: Any) -> None:
        """Backward is done; gradients are still scaled and the weights are as they were."""
        started, now = time.perf_counter(), self.now
        gradients = self._optimizers.gradients(optimizer)
        with no_dispatch():
            now.readout = read_norms(list(gradients.items()))
        self._histograms.gradients_complete(optimizer)
        now.read_scaler(scaler)
        held, scale = self._flight.forwards, now.scale
        if scaler is not None or now.readout.is_immediate:  # GradScaler waits here as it is
            with no_dispatch():
                now.norms = checked(now.readout.norms(), gradients)
            if now.is_bad:
                self._histograms.count_bad(optimizer)
                now.events += self.bad.examine(
                    now.step, as_number(now.loss), scale, held, is_late=False
                )
        if now.step in self.referenced:
            self.referenced.discard(now.step)
            now.run_again(self.bad.reference(held, scale))
        now.own_s += time.perf_counter() - started

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        self._histograms.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        self._histograms.after_step(optimizer)

    def attempt_ended(self, optimizer: Optimizer, scaler: Any, *, skipped: bool) -> None:
        """The step is over, taken or skipped."""
        started, now = time.perf_counter(), self.now
        now.own_s += self._histograms.take_elapsed_s() + self._flight.take_elapsed_s()
        frames, nonfinite = self._histograms.take(now.scale or 1.0)
        ended = Ended(
            now, skipped, lr_of(optimizer),
            max(started - now.began - now.own_s, 0.0), peak_bytes(self._device), frames, nonfinite,
            list(self._flight.forwards),
        )  # fmt: skip
        self._optimizers.stepped(optimizer)
        self._flight.drop(self._optimizers.models(optimizer))
        self.bad.end_step()
        self._finish_late()
        alarms: list[Event] = []
        if now.norms is None and now.readout is not None:
            self._late = ended
        else:
            alarms = self._finish(ended)
        self._begin(now.step + 1)
        self.now.own_s += time.perf_counter() - started
        self.telling.tell(alarms)

    def _finish_late(self) -> None:
        """The step before, whose numbers have had a whole step's time to arrive."""
        ended, self._late = self._late, None
        if ended is None:
            return
        now = ended.now
        now.norms = now.readout.norms() if now.readout is not None else None
        if now.is_bad:
            loss = as_number(now.loss)
            now.events += self.bad.examine(now.step, loss, None, ended.forwards, is_late=True)
        self.telling.tell(self._finish(ended))

    def _finish(self, ended: Ended) -> list[Event]:
        """Record the step; returns its alarms."""
        record, events = ended.record(), ended.now.events
        if not ended.is_bad:
            self.bad.good()
        if self.schedule.saw(self.now.step, bad=ended.is_bad):
            events.append(announcements.tightened(record.step))
        alarms = self._alarms.check(record, ended.frames.get(Role.WEIGHT_GRAD))
        self.telling.told += alarms
        events += alarms
        self.recorder.step(record, ended)
        self._flight.past.append(ended.past(len(self._models.parameters)))
        return alarms

    def _begin(self, step: int) -> None:
        self.now = Present(step)
        detail = self.schedule.detail(step, self._optimizers.round_of(step))
        self._histograms.start(step, detail)
