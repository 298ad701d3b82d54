"""The instruments of a probe, put together: what each of them does at which moment of a step.

    start       weights counted; the fp32 shadow runs its own step, at sampled steps
    recording   op trace and shadow comparison are attached to the real step
    gradients   complete, still scaled: counted, compared with the shadow's
    before      the optimizer's step: gradient norm; the weights are remembered
    finish      updates counted; everything goes to the writer

The loop's docstring has the training's side of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.failures import Failures, OwnTime
from ampscope.capture.histograms import HistogramHooks
from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from ampscope.capture.own_ops import own_ops, script_ops
from ampscope.capture.shadow import Shadow, random_state_kept, remembered
from ampscope.capture.weights import WeightObserver, gradient_norm, moved_share
from ampscope.records import Cadence, Role
from ampscope.runner.training import ProbeTraining, checked_loss
from ampscope.store.writer import RunWriter
from ampscope.workloads.protocol import Batch

CLIPPED = 0.999  # of the norm: less than this is a clip, and not the rounding of unscale_
MOST_SKIPS = 100  # a search from 2^32 skips 20 steps; a run that skips more has shown enough
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Instruments:
    """Everything that watches one training; what it saw goes to ``writer``.

    ``arithmetic`` is the mode that computes the ops, or None; the step runs inside it.
    """

    def __init__(
        self,
        training: ProbeTraining,
        cadence: Cadence,
        writer: RunWriter,
        arithmetic: TorchDispatchMode | None = None,
    ) -> None:
        self.training = training
        self.cadence = cadence
        self.writer = writer
        self.grad_norm: float | None = None  # of this step as the optimizer got it, unscaled
        self.unclipped_norm: float | None = None  # before the workload's own step clipped it
        self._complete_norm: float | None = None  # as backward left it, unscaled
        self.moved_share: float | None = None
        self.op_set: int | None = None
        self._names = ModelMap(training.model)
        self._failures = Failures()
        self._counts = Accumulator(self._failures)
        self._hooks = HistogramHooks(self._names, self._counts, self._failures)
        self._weights = WeightObserver(self._names, self._counts)
        self._trace = OpTrace(self._names, executes=arithmetic, failures=self._failures)
        self._arithmetic = arithmetic
        self._time = OwnTime(self._failures)
        self._shadows = ShadowRuns(training, self._names, cadence.shadow, self._time)
        self._shadow: Shadow | None = None
        self._asked = self._stepped = False
        self._step, self._scale = -1, 1.0
        self._carried = 1.0  # what the gradients still carry when the optimizer steps
        self._batch: Batch | None = None

    @property
    def note(self) -> str:
        """One sentence on what could not be recorded, or nothing."""
        return " ".join(filter(None, (self._shadows.note, self._failures.note)))

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on; all off on exit."""
        scaler = self.training.scaler
        scaler.on_gradients, scaler.on_step = self._on_gradients, self._on_step
        after_step = self.training.optimizer.register_step_post_hook(self._after_step)
        self.writer.add_modules(self._names.records())
        try:
            with self._hooks, self._weights:
                yield
        finally:
            scaler.unobserved()
            after_step.remove()

    def start(self, step: int, batch: Batch, scale: float) -> None:
        """Before the step, which will use this loss scale."""
        self._step, self._scale, self._batch = step, scale, batch
        self._carried = scale
        self._asked = self._stepped = False
        self.grad_norm = self.moved_share = self.op_set = None
        self.unclipped_norm = self._complete_norm = None
        with self._time.spent("the histograms of the weights"):
            if self._is_due(self.cadence.histogram):
                self._weights.count_weights()
        with self._time.spent("the fp32 shadow"), script_ops():
            self._shadow = self._shadows.run(step, scale, batch)
        self._weights.start_step()
        self._hooks.start_step(step, active=self._is_due(self.cadence.histogram))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around the step itself."""
        with contextlib.ExitStack() as stack:
            if self._shadow is not None:
                stack.enter_context(self._shadow)
            if self._is_due(self.cadence.trace):
                stack.enter_context(self._trace)
            elif self._arithmetic is not None:
                stack.enter_context(self._arithmetic)
            yield

    @property
    def was_skipped(self) -> bool:
        """The scaler was asked to step and left the optimizer out."""
        return self._asked and not self._stepped

    def finish(self, *, skipped: bool) -> None:
        """After the step; what was seen goes to the writer."""
        with self._time.spent("the end of a step's histograms"):
            self._hooks.end_step()
        if skipped and self._shadow is None:
            with self._time.spent("the fp32 shadow of a skipped step"):
                with script_ops():
                    self._shadow = self._shadows.run_skipped(self._step, self._carried, self._batch)
                if self._shadow is not None:
                    self._shadow.compare_weights()
        self._batch = None
        with self._time.spent("the histograms of the updates"):
            if skipped:
                self.moved_share = 0.0
            elif self._asked and self._is_due(self.cadence.histogram):
                self._weights.count_updates()
        with self._time.spent("the histograms of a step"):
            self._write_frames()
        shadow, self._shadow = self._shadow, None
        if shadow is not None:
            with self._time.spent("the comparison with fp32"):
                self.writer.add_shadow(shadow.take())
        if self._is_due(self.cadence.trace):
            with self._time.spent("the ops of a step"):
                self.op_set, ops = self._trace.take()
                self.writer.add_ops(self.op_set, ops)

    def take_elapsed_s(self) -> float:
        """The instruments' wall time since the last call."""
        total = self._time.take() + self._hooks.elapsed_s + self._trace.elapsed_s
        self._hooks.elapsed_s = self._trace.elapsed_s = 0.0
        return total

    def _on_gradients(self) -> None:
        """Gradients are complete and still scaled."""
        self._trace.place.outside = "step"
        if self.training.workload.step is not None:  # the usual step clips nothing
            with self._time.spent("the norm of the gradients"), own_ops():
                self._complete_norm = gradient_norm(self._names) / self._scale
        if self._shadow is not None:
            with self._time.spent("the comparison of the weights' gradients with fp32"):
                self._shadow.compare_weights()
        if self._is_due(self.cadence.histogram):
            with self._time.spent("the histograms of the weights' gradients"):
                self._weights.count_gradients()

    def _on_step(self, is_unscaled: bool) -> None:
        """The optimizer is about to step, or to be skipped."""
        was_asked, self._asked = self._asked, True
        norm = 0.0
        self._carried = 1.0 if is_unscaled else self._scale
        with self._time.spent("the norm of the gradients"):
            with own_ops():
                norm = gradient_norm(self._names)
            self.grad_norm = norm if is_unscaled else norm / self._scale
            before = self._complete_norm
            if before is not None and self.grad_norm < CLIPPED * before:
                self.unclipped_norm = before
        with self._time.spent("the weights before a step"):
            if self._is_due(self.cadence.histogram):
                if not was_asked:  # a step of its own may call the optimizer several times
                    self._weights.remember()
            elif not math.isfinite(norm):
                # Whatever the cadence: a skip always says which gradients were not finite.
                self._weights.count_gradients()

    def _after_step(self, *_: object) -> None:
        self._stepped = True

    def _write_frames(self) -> None:
        frames = self._counts.take(self._step, self._scale)
        gradients = frames.pop(Role.WEIGHT_GRAD, None)
        if gradients is not None:
            self.writer.add_nonfinite(self._weights.nonfinite(gradients))
            if self._is_due(self.cadence.histogram):
                frames[Role.WEIGHT_GRAD] = self._weights.by_module(gradients)
        if Role.UPDATE in frames:
            self.moved_share = moved_share(frames[Role.UPDATE])
        for frame in frames.values():
            self.writer.add_frame(frame)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self._step % every == 0


class ShadowRuns:
    """Runs the fp32 shadow's own step every ``every`` steps, where the workload allows one; 0, or
    fp32 training, is none.

    Without a shadow, values lost in half precision cannot be distinguished from those that were
    always zero; the reason is kept as a sentence for the page that would have shown it.
    """

    def __init__(self, training: ProbeTraining, names: ModelMap, every: int, time: OwnTime) -> None:
        self.note = ""  # why there is no shadow although one was asked for
        self._time = time
        self._training = training
        self._names = names
        self._remembered: Callable[[], None] | None = None
        self._skips = 0  # of which a shadow was run
        self._every = every if training.compute_format != "fp32" else 0
        if self._every > 0 and training.workload.step is not None:
            self._give_up("the workload has a training step of its own, which it cannot run")

    def run(self, step: int, scale: float, batch: Batch) -> Shadow | None:
        """The shadow of this step, already run in fp32; None when it is not sampled."""
        self._remembered = None
        if self._every <= 0:
            return None
        if step % self._every:
            # Should the scaler skip this step, the shadow runs it after all, as it was.
            self._remembered = remembered(self._training.model)
            return None
        return self._run(step, scale, batch)

    def run_skipped(self, step: int, scale: float, batch: Batch) -> Shadow | None:
        """The shadow of a step that the scaler has just skipped, where none ran before it: whether
        fp32's gradients are as large. ``scale`` is what the gradients still carry."""
        put_back, self._remembered = self._remembered, None
        if put_back is None or self._skips >= MOST_SKIPS:
            return None
        self._skips += 1
        with random_state_kept(self._training.model):
            put_back()
            return self._run(step, scale, batch)

    def _run(self, step: int, scale: float, batch: Batch) -> Shadow | None:
        training = self._training
        computes_in = _HALVES.get(training.compute_format)
        shadow = Shadow(self._names, step, scale, computes_in, self._time)
        try:
            shadow_batch = training.shadow_batch(batch)
            shadow.run_shadow(lambda m: checked_loss(training.workload.loss(m, shadow_batch)))
        except Exception as error:  # whatever a copy of the user's model may raise: the run goes on
            self._give_up(f"a copy of the model in fp32 raised {type(error).__name__}")
            return None
        return shadow

    def _give_up(self, reason: str) -> None:
        self._every = 0
        self.note = (
            f"The fp32 shadow is off: {reason}. Lost values cannot be distinguished from zeros in "
            "this run."
        )
