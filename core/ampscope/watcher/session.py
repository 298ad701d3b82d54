"""What a watched training goes through, step by step: instruments, decisions, records.

    loss_seen           at backward
    gradients_complete  still scaled: norms at every step; histograms when they are due; when they
                        are not finite: who holds it, and a capsule where it is no calibration
    before_step, after_step  around the optimizer's own step, unless the scaler skips it
    optimizer_stepped   taken or skipped: the step ends. Its record, and the alarms that begin with
                        it, go to the recorder; the schedule of the next step; the user is told

The names are those of the callbacks (:class:`ampscope.capture.training_events.TrainingListener`).

On CUDA the numbers of a step travel to the host while the training goes on, and the step is
finished while the next one runs. With a plain GradScaler the numbers are read after its own wait;
where the script calls ``unscale_`` itself, the watch waits there. Nothing waits for the histograms
of a good step.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture import tensor_table
from ampscope.capture.exponent_count import prepare
from ampscope.capture.failures import working_s
from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.optimizer_facts import lr_of
from ampscope.capture.tensors import in_backward
from ampscope.capture.training_events import TrainingEvents, TrainingListener
from ampscope.capture.user_objects import IdSet
from ampscope.errors import BadInput
from ampscope.healthy import mark_healthy
from ampscope.numerics.histogram import NAN, NEG_INF, POS_INF
from ampscope.records import Event, Role, State
from ampscope.runner.device import describe, read_too, sample_telemetry
from ampscope.watcher.alarm_dispatcher import AlarmDispatcher, WatchSettings
from ampscope.watcher.alarms import Alarms, Signs, warn
from ampscope.watcher.bad_steps import BadSteps
from ampscope.watcher.capsule_store import CapsuleStore
from ampscope.watcher.clips import WatchedClips
from ampscope.watcher.flight import FlightRecorder, Forward
from ampscope.watcher.gradient_norms import first_nonfinite, in_parts, start_norms
from ampscope.watcher.guard import Guard
from ampscope.watcher.histograms import StepHistograms, TappedHistograms
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.place import RankPlace
from ampscope.watcher.recorder import Recorder
from ampscope.watcher.schedule import TIGHT_STEPS, Schedule
from ampscope.watcher.state_guard import StateGuard
from ampscope.watcher.step import (
    ClosedStep,
    OpenStep,
    PendingFlag,
    StepNumbers,
    lr_on_device,
    scaler_numbers,
)
from ampscope.watcher.watched_optimizers import UnseenSteps, WatchedOptimizers
from ampscope.watcher.watched_run import notes, run_of
from ampscope.watcher.webhook import Webhook

WEIGHT_SCAN_STEPS = 4  # steps in which every weight is looked at once
INSIDE_TEXT = (
    "The optimizer steps inside backward: the step cannot be run again before it is taken."
)
CAPTURED_TEXT = (
    "A CUDA graph is recorded (torch.cuda.graph, make_graphed_callables): what runs in it is not "
    "seen, neither while it is recorded nor at any replay, which runs no Python. Steps outside of "
    "it are recorded as ever."
)


class Session(TrainingListener):
    """One watched training; a listener of its steps."""

    def __init__(
        self, models: WatchedModels, optimizers: list[Optimizer], scalers: list[Any],
        path: Path, place: RankPlace, settings: WatchSettings,
    ) -> None:  # fmt: skip
        self.now = OpenStep(0)
        self.referenced: set[int] = set()  # steps to run again beside fp32
        self.schedule = Schedule(settings.every)
        self._models, self.place = models, place
        self._device = models.parameters[0].tensor.device
        spec, machine = run_of(models, place, settings, self._device)
        self._spec, self.recorder = spec, Recorder(path, spec, machine)
        self.guard = guard = Guard(self._gave_up, partial(self._unseen, CAPTURED_TEXT))
        self._webhook = (
            Webhook(settings.webhook, self._webhook_failed) if settings.webhook else None
        )
        self.dispatcher = AlarmDispatcher(
            settings, lambda: self.recorder.is_cancelled, partial(self._send, spec.label)
        )
        self._state = StateGuard(models, settings.ema) if settings.guard else None
        self._state_alarms: list[Event] = []  # of averages, seen before a backward
        self.last_healthy = ""  # a checkpoint's path and step, in words
        threads = {threading.get_ident()}  # that train these models
        inside = TappedHistograms(models, guard, self._unseen) if settings.taps else None
        self._histograms = StepHistograms(models, guard, inside)
        self._flight = FlightRecorder(models, threads, guard)
        self.capsule_store = CapsuleStore(
            models, self._flight.past, self.recorder.path, settings.limits
        )
        self.bad = BadSteps(
            models, self._histograms, self._flight, self.capsule_store, self.recorder, place,
            machine.policy, settings, guard,
        )  # fmt: skip
        self._optimizers = WatchedOptimizers(models, optimizers, self._optimizers_changed)
        self._events = TrainingEvents(self, self._optimizers.has, threads, guard, scalers)
        self._clips = WatchedClips(threads, guard)
        self._alarms = Alarms(settings.bounds)
        # A step whose numbers or histograms are on their way from the device, what it ran, what the
        # sentinel saw of it, and its losses.
        self._late: tuple[ClosedStep, list[Forward], list[Tensor], OpenStep] | None = None
        self._late_alarms: list[Event] = []  # to be reported at the end of the present step
        self._stack = contextlib.ExitStack()
        trained = [p.tensor for p in models.parameters if p.tensor.requires_grad]
        self._unseen_steps = UnseenSteps(trained, self._unseen)
        self._has_stepped = self._has_sampler = False
        self._inside: list[tuple[Optimizer, StepNumbers]] = []  # stepped in the backward that runs
        self._backward = -1  # torch's number of it
        self._parts_of_weights = in_parts([p.tensor for p in models.parameters], WEIGHT_SCAN_STEPS)
        self._numbers: dict[int, StepNumbers] = {}  # by optimizer, between complete and stepped

    def open(self) -> None:
        """Everything on."""
        with _LOCK:
            _OPEN.add(self)
        self.recorder.modules(self._models.records())
        for note in notes(self._models, self.place, taps=self._histograms.inside is not None):
            self.recorder.event(note)
        self._sample()
        self.guard.call(self._unseen_steps.look)  # keeps a copy of one small parameter
        if self._device.type == "cpu":
            self.guard.call(tensor_table.works)  # compiles now, and not within a step
        self._prepare()
        self.recorder.close_by(self.close)
        self.attach(0)

    def _prepare(self) -> None:
        for device in dict.fromkeys(p.tensor.device for p in self._models.parameters):
            if text := prepare(device):
                self.recorder.event(Event(0, "note", "exponent counter", text))

    def _sample(self) -> None:
        # On a CPU a second process would cost what it measures.
        if self.recorder.error or self._device.type != "cuda":
            return
        if self._has_sampler:  # the model has moved to another GPU
            read_too(self.recorder.readings, self._device)
            return
        self._has_sampler, run = True, (self.recorder.path, self.recorder.run_id)
        self.recorder.readings = sample_telemetry(*run, self._device, as_child=False)

    def _locate(self) -> None:
        """The model may have moved to a device after watch()."""
        device = self._models.parameters[0].tensor.device
        if device == self._device:
            return
        self._device = device
        machine = describe(self._spec, device)
        self.recorder.machine(machine)
        self.bad.policy = machine.policy
        self._sample()
        self._prepare()

    def attach(self, step: int) -> None:
        """All instruments on; the next step is number ``step``."""
        for instrument in (
            self._histograms,
            self._flight,
            self.bad.sentinel,
            self._events,
            self._clips,
        ):
            if instrument is not None:
                self._stack.enter_context(instrument)
        self._begin(step, time.perf_counter())

    def detach(self) -> None:
        """All instruments off; again does nothing."""
        self._stack.close()

    def close(self, state: State, message: str) -> None:
        """Everything off; again does nothing."""
        with _LOCK:
            _OPEN.discard(self)
        self.guard.call(self.backward_ended)  # of a backward that raised
        self.detach()
        if not self._has_stepped and self._histograms.has_gradients:
            self.guard.call(self._unseen_steps.look, last=True)
        try:
            self.guard.call(self._report_late)
        finally:
            if self._webhook is not None:
                self._webhook.close()
            self.recorder.close(state, message)

    def _report_late(self) -> None:
        """Finish the last step. Its alarms can end no training any more."""
        alarms, self._late_alarms = self._late_alarms + self._finish_late(), []
        self.dispatcher.reported += alarms
        self.dispatcher.tell(alarms)

    def _unseen(self, text: str) -> None:
        """Say once what of this training cannot be seen."""
        self.recorder.event(Event(self.now.step, "note", "cannot be seen", text))
        warn(text)

    def _gave_up(self, reason: str) -> None:
        """An error of ampscope's own: everything off, and the training goes on without it."""
        try:
            self.recorder.event(Event(self.now.step, "note", "stopped watching", reason))
        finally:
            self.detach()

    def loss_seen(self, loss: Tensor) -> None:
        """Before a backward."""
        self.now.see(loss)
        if self._state is not None and self.now.step > 0:
            started = working_s()
            self._note(self._state.before_backward(), self.now.step - 1)
            self.now.own_s += working_s() - started
        if not self._has_stepped:
            self._unseen_steps.look()

    def gradients_taken(self, scaled: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The training itself took gradients of what was scaled."""
        started = working_s()
        with own_ops():
            self.now.take_gradients(scaled, gradients)
        self.now.own_s += working_s() - started

    def losses_dropped(self) -> None:
        """Gradients were set to zero."""
        self.now.drop_losses()

    def _optimizers_changed(self, text: str, is_lost: bool) -> None:
        name = "cannot be seen" if is_lost or "not seen" in text else "optimizer"
        self.recorder.event(Event(self.now.step, "note", name, text))
        if is_lost:
            warn(text)

    def gradients_complete(self, optimizer: Optimizer, scaler: Any) -> None:
        """Backward is done; gradients are still scaled and the weights are as they were."""
        started, step = working_s(), self.now.step
        if not self._has_stepped:
            self._locate()
        gradients = self._optimizers.gradients(optimizer)
        with own_ops():
            loss, weights = self.now.take_loss(), self._some_weights()
            clip = self._clips.take(self._optimizers.with_gradients(optimizer))
            of_scaler = scaler_numbers(scaler)
            rate = lr_on_device(optimizer)
            pending = start_norms(gradients, loss, weights, clip, of_scaler, rate)
        numbers = self._numbers[id(optimizer)] = StepNumbers((pending,), scaler)
        self.now.own_s += working_s() - started
        self._histograms.gradients_complete(optimizer)  # which says itself how long it took
        started = working_s()
        if not in_backward():  # a bad step may need more memory than a backward leaves
            self._late_alarms += self._finish_late()  # before the weights change again
        if pending.is_immediate or (
            scaler is not None and not self._can_wait(optimizer, of_scaler)
        ):
            self._judge(optimizer, numbers, is_unscaled=False)
        if step in self.referenced and in_backward():
            self.referenced.discard(step)
            numbers.run_again(INSIDE_TEXT, step)
        elif step in self.referenced:
            self.referenced.discard(step)
            numbers.run_again(self.bad.reference(self._flight.forwards, numbers.scale), step)
        self.now.own_s += working_s() - started

    def _can_wait(self, optimizer: Optimizer, of_scaler: list[Tensor]) -> bool:
        """Whether the numbers of a step with a scaler may be read later than before ``unscale_``:
        after the wait in ``scaler.step``, or a step later where a fused optimizer has none.

        A script that calls ``unscale_`` itself may change the gradients before ``scaler.step``: a
        clip by a norm that is NaN makes all of them NaN. What is said of bad gradients needs them
        as backward left them, so the numbers are read before ``unscale_``."""
        if in_backward() or self.now.step in self.referenced or not of_scaler:
            return False
        return is_fused(optimizer) or self._events.is_in_scaler_step

    def _judge(self, optimizer: Optimizer, numbers: StepNumbers, *, is_unscaled: bool) -> None:
        """Read the numbers, and see to it that a bad step is kept while its gradients are here.
        ``is_unscaled``: the gradients have been, since their norms were taken."""
        has_scaler = numbers.scaler is not None
        numbers.read_scaler()
        numbers.is_search = has_scaler and numbers.is_loss_bad and self.now.is_search
        numbers.is_judged = True
        (pending,) = numbers.pending
        if pending.suspects:
            scale = (is_unscaled and numbers.scale) or 1.0
            with own_ops():
                pending.check(self._optimizers.gradients(optimizer), scale)
        if numbers.is_bad:
            if self.schedule.is_news:
                self._histograms.count_bad(optimizer, is_unscaled=is_unscaled)
            if not in_backward():  # otherwise once the last parameter has been reached
                forwards, sums = self._flight.forwards, self.bad.sums
                numbers.events += self.bad.examine(
                    self.now.step, numbers, forwards, sums, is_late=self.now.is_late
                )

    def _judge_behind_wait(self, optimizer: Optimizer) -> None:
        """GradScaler has just waited for what it found in the gradients, and unscaled them."""
        numbers = self._numbers.get(id(optimizer))
        if numbers is None or numbers.scaler is None or is_fused(optimizer):
            return
        started = working_s()
        self._judge(optimizer, numbers, is_unscaled=True)
        self.now.own_s += working_s() - started

    def _some_weights(self) -> list[Tensor]:
        """A part of all weights, every part in turn: a weight may go bad alone."""
        if self.now.has_weights:  # two optimizers, or one per parameter, in one step
            return []
        self.now.has_weights = True
        return self._parts_of_weights[self.now.step % WEIGHT_SCAN_STEPS]

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step; a closure may call backward several times inside."""
        self._unseen_steps.is_known = True
        self.now.is_late = id(optimizer) not in self._numbers
        self._judge_behind_wait(optimizer)
        self._histograms.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer's step."""
        self._histograms.after_step(optimizer)

    def optimizer_dropped(self, optimizer: Optimizer) -> None:
        """Its gradients were unscaled, and it is not going to step."""
        self._numbers.pop(id(optimizer), None)
        self._histograms.drop(optimizer)
        self._flight.drop(self._optimizers.models(optimizer))

    def optimizer_stepped(self, optimizer: Optimizer, *, skipped: bool | Tensor) -> None:
        """The step is over, taken or skipped. Optimizers that step while backward runs, each as
        soon as its parameter is reached, make one step together."""
        self._has_stepped, self.now.is_late = True, False
        self._judge_behind_wait(optimizer)  # of a step that was skipped
        numbers = self._numbers.pop(id(optimizer))
        numbers.stalled = self._histograms.stalled_share
        with own_ops():
            if isinstance(skipped, Tensor) and not numbers.is_judged:
                numbers.skipped = PendingFlag(skipped)
            else:
                numbers.skipped = bool(skipped)
        if numbers.skipped is not True and (
            clip := self._clips.take(self._optimizers.with_gradients(optimizer))
        ):
            numbers.clipped_to = clip.limit  # after the gradients were read
        if not in_backward():
            self._step_ended([(optimizer, numbers)], inside=False)
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self.backward_ended()  # of one whose end was not seen
        self._backward = backward
        self._inside.append((optimizer, numbers))

    def backward_ended(self) -> None:
        """After a backward: the optimizers inside have made their step."""
        parts, self._inside = self._inside, []
        if parts:
            self._step_ended(parts, inside=True)

    def _step_ended(self, parts: list[tuple[Optimizer, StepNumbers]], *, inside: bool) -> None:
        started, began, now = working_s(), time.perf_counter(), self.now
        optimizers = [optimizer for optimizer, _ in parts]
        models = set().union(*map(self._optimizers.models, optimizers))
        numbers = StepNumbers.joined([numbers for _, numbers in parts])
        forwards, sums = list(self._flight.forwards), self.bad.end_step()
        if inside and numbers.is_judged and numbers.is_bad:
            numbers.events += self.bad.examine(now.step, numbers, forwards, sums, is_late=True)
        counted = self._histograms.take(optimizers, numbers.scale or 1.0)
        counting_s = self._histograms.take_elapsed_s()
        self.schedule.took(counting_s, began - now.began)
        own_s = now.own_s + counting_s + self._flight.time.take()
        step_time_s = max(began - now.began - own_s, 0.0)
        lr = lr_of(optimizers[0]) if lr_on_device(optimizers[0]) is None else None
        closed = ClosedStep(
            now.step, numbers, lr, step_time_s, own_s, self._flight.peaks.bytes(self._device),
            time.time(), counted, self._optimizers.stepped(optimizers),
        )  # fmt: skip
        unread = numbers.is_judged and not numbers.is_bad and numbers.again is None
        self._flight.drop(models, unread=unread)
        alarms, self._late_alarms = self._late_alarms + self._finish_late(), []
        if not numbers.is_judged:
            self._late = closed, self._without_large_inputs(forwards), sums, now
        elif not counted.is_here and not closed.is_bad:
            self._late = closed, [], [], now
        else:
            alarms += self._finish(closed)
        if self._state is not None:
            self._note(self._state.after_step(optimizers), now.step)
            alarms += self._state_alarms
            self._state_alarms = []
        self.dispatcher.reported += alarms
        self._begin(now.step + 1, began)
        self.now.own_s += working_s() - started
        self.dispatcher.dispatch(alarms)

    def _note(self, found: list[tuple[str, str]], step: int) -> None:
        """Alarms of the state guard, to be reported at the end of the step."""
        healthy = self.last_healthy or "none was marked so far"
        for name, text in found:
            text = f"{text} Last healthy checkpoint: {healthy}."
            alarm = Event(step, "alarm", name, f"{text} Rank {self.place.rank}, step {step}.")
            self.recorder.event(alarm)
            self._state_alarms.append(alarm)

    def checkpoint(self, path: Path, *, keep: bool, problem: str | None = None) -> bool:
        """Whether what a checkpoint at ``path`` holds was finite; then it is marked healthy.
        ``problem`` is what :meth:`state_problem` said when it was saved."""
        step = max(0, self.now.step - 1)
        bad = self.state_problem() if problem is None else problem
        if not bad:
            try:
                named = mark_healthy(path, step, self.recorder.run_id, keep=keep)
            except OSError as error:
                bad = f"it cannot be marked ({error.strerror or error})"
            else:
                self.last_healthy = f"{named} (step {step})"
                self.recorder.event(Event(step, "checkpoint", "healthy", "", path=str(named)))
                return True
        text = f"A checkpoint was not marked healthy: {bad}."
        self.recorder.event(Event(step, "checkpoint", "not healthy", text, path=str(path)))
        return False

    def state_problem(self) -> str:
        """What of weights, averages, buffers and optimizer state is not finite now; "" where all
        is. Waits for the device."""
        if self._state is None:
            raise BadInput("watch() was called without guard=True: it marks no checkpoint.")
        return self._state.problem()

    def _send(self, name: str, alarms: list[Event]) -> None:
        if self._webhook is not None and alarms:
            self._webhook.send(alarms, self.recorder.run_id, name, self.place.rank)

    def _webhook_failed(self, text: str) -> None:
        self.recorder.event(Event(self.now.step, "note", "webhook", text))

    def _begin(self, step: int, began: float) -> None:
        """``began``: before what is still done for the last step, which the new one's own time
        includes."""
        self.now = OpenStep(step, began=began)
        histograms, weights = self.schedule.detail(step, self._optimizers.round_of(step))
        self._histograms.start(step, histograms=histograms, weights=weights)

    def _finish_late(self) -> list[Event]:
        """Finish the step that waits, whose numbers have had a whole step's time to arrive."""
        if self._late is None:
            return []
        (closed, forwards, sums, then), self._late = self._late, None
        numbers = closed.numbers
        has_scaler = numbers.scaler is not None
        closed.arrive()
        if not numbers.is_judged:
            numbers.is_search = has_scaler and numbers.is_loss_bad and then.is_search
            if numbers.is_bad:
                late = not numbers.skipped  # a step that was skipped has left the weights alone
                numbers.events += self.bad.examine(
                    closed.step, numbers, forwards, sums, is_late=late
                )
        return self._finish(closed)

    def _without_large_inputs(self, forwards: list[Forward]) -> list[Forward]:
        """The calls of a step that waits while the next one runs, whose peak large inputs would
        raise. While steps go bad all inputs are kept."""
        if self.bad.is_in_streak:
            return forwards
        room, kept = self._flight.peaks.held_bytes(self._device), list[Forward]()
        for forward in reversed(forwards):
            room -= forward.input_bytes
            kept.insert(0, forward if room >= 0 else forward.without_inputs())
        return kept

    def _finish(self, closed: ClosedStep) -> list[Event]:
        """Judge the step and record it; returns the alarms that begin with it."""
        numbers = closed.numbers
        if numbers.skipped:  # a fused optimizer ran, and moved nothing
            closed.frames.pop(Role.UPDATE, None)
        record, is_bad = closed.record(), closed.is_bad
        if not is_bad:
            self.bad.good()
        if self.schedule.saw(self.now.step, bad=is_bad):  # from the next step on
            text = f"A step went bad: the next {TIGHT_STEPS} steps are recorded with histograms."
            numbers.events.append(Event(record.step, "schedule", "tightened", text))
        bad_gradient = self._bad_gradient(closed)
        signs = Signs(
            optimizer=closed.optimizer,
            has_gradients=any(part.positions for part in numbers.pending),
            bad_gradient=bad_gradient,
            bad_weight=self._bad_weight(closed),
            stalled=numbers.stalled,
            is_search=numbers.is_search,
        )
        alarms = self._alarms.check(record, closed.frames.get(Role.WEIGHT_GRAD), signs)
        where = self._where(closed, bad_gradient if is_bad else "", is_bad=is_bad) if alarms else ""
        alarms = [replace(alarm, text=f"{alarm.text} {where}") for alarm in alarms]
        numbers.events += alarms
        self.recorder.step(record, closed)
        self._flight.past.append(closed.summary(len(self._models.parameters)))
        return alarms

    def _bad_gradient(self, closed: ClosedStep) -> str:
        if closed.nonfinite:
            return closed.nonfinite[0].parameter  # the first that backward reached
        suspects = closed.numbers.suspects
        return self._models.parameters[suspects[-1]].name if suspects else ""

    def _bad_weight(self, closed: ClosedStep) -> str:
        """A weight that is not finite now. Weights are read at a step that went bad, until one was
        reported (a bad weight makes GradScaler leave out every step); where the step's histograms
        say so; and where the look at some of them did."""
        counted, numbers = closed.frames.get(Role.WEIGHT), closed.numbers
        seen = counted is not None and bool(counted.rows[:, [NAN, POS_INF, NEG_INF]].any())
        if not (seen or numbers.is_bad or numbers.has_bad_weight) or self._alarms.rings(
            "nonfinite_weight"
        ):
            return ""
        return first_nonfinite({p.name: p.tensor for p in self._models.parameters})

    def _where(self, closed: ClosedStep, bad_gradient: str, *, is_bad: bool) -> str:
        """Where an alarm's step was, and what to run."""
        parts = [f"Rank {self.place.rank}, step {closed.step}."]
        if is_bad:
            if bad_gradient:
                module = bad_gradient.rpartition(".")[0] or "the model itself"
                parts.append(f"The first bad gradient is that of {bad_gradient} (module {module}).")
            kept = [e.path for e in closed.numbers.events if e.kind == "capsule"]
            kept += [str(path) for path in self.capsule_store.paths[-1:]]
            if kept:
                parts.append(f"Capsule: {kept[0]}.")
                if not self._models.is_sharded:  # one rank alone cannot run it again
                    parts.append(
                        f"Run: ampscope replay {shlex.quote(kept[0])} --model YOUR_FILE.py:BUILD"
                    )
        return " ".join(parts)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether GradScaler lets it find out by itself, on the device, that a step is to be left
    out."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


_OPEN: IdSet[Session] = IdSet()
_LOCK = threading.Lock()
REPLACED = "The same model was watched anew."


def close_watches_of(models: WatchedModels) -> None:
    """Close the watches of any of these models, and say so: a notebook's cell that is run again
    means one watch, not two."""
    roots = [root.plain for root in models.roots]
    with _LOCK:
        earlier = [
            session
            for session in _OPEN
            if any(root.plain is new for root in session._models.roots for new in roots)
        ]
    for session in earlier:
        with contextlib.suppress(Exception):  # stderr may be closed
            print(
                f"ampscope: the model is watched anew, run {session.recorder.run_id} is closed.",
                file=sys.stderr,
                flush=True,
            )
        session.close(State.FINISHED, REPLACED)
