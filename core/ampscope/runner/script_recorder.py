"""Everything that watches an untouched script; the result is a list of observations.

:class:`ScriptRecorder` puts the instruments of ``capture/script`` together. :class:`ScriptWriting`
keeps what was seen while the script runs, for it may be killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ampscope.capture.failures import ContainedPatches, Failures
from ampscope.capture.global_hooks import FORWARD_ALWAYS
from ampscope.capture.script import line_uses
from ampscope.capture.script.call_log import CallLog
from ampscope.capture.script.calls import Calls
from ampscope.capture.script.dtype_ledger import DtypeLedger
from ampscope.capture.script.half_sites import HalfSites
from ampscope.capture.script.line_uses import LineUses
from ampscope.capture.script.module_paths import ModulePaths, unwrapped
from ampscope.capture.script.op_precision import OpPrecision
from ampscope.capture.script.op_watch import OpWatch
from ampscope.capture.script.optimizer_steps import OptimizerSteps
from ampscope.capture.script.run_digests import LineDigests, RunDigests
from ampscope.capture.script.script_histograms import ScriptHistograms, ScriptMeasurements
from ampscope.capture.script.script_scans import ScriptScans, inputs_call
from ampscope.capture.tensors import (
    HALF,
    all_finite,
    floating_tensors,
    in_backward,
    is_capturing,
    plain,
)
from ampscope.capture.training_events import StepEvents, StepListener
from ampscope.capture.user_objects import modules, parameters, parameters_of
from ampscope.numerics.formats import dtype_name
from ampscope.observations import Observation, OptimizerStep, Outcome
from ampscope.patches import Patches
from ampscope.policy import op_lists
from ampscope.records import Cadence, StepRecord
from ampscope.runner import script_ending
from ampscope.runner.device import peak_bytes
from ampscope.runner.half_requests import HalfRequests
from ampscope.source_lines import SourceLines, line_name
from ampscope.store.writer import FIRST_STEPS, Pace, RunWriter

LEDGER_STEPS = 3  # first ones, in which activations and state get their dtypes
OP_BUDGET = 400_000  # ops looked at: about 15 s of watching on a slow core
PREPARES = 3_000  # and of those before a training begins
WRITING_SHARE = 0.05
LONGEST_PAUSE_S = 10.0
MAX_TEXT = 2_000
# A caught error is reported with its text where it is frequent; once is a way to try things.
MIN_CAUGHT, CAUGHT_SHARE = 3, 0.05  # of the steps and the errors together
# On the error itself, because ids are used again: path of the innermost module; that it is counted.
_MARK, _COUNTED = "_ampscope_module", "_ampscope_counted"
# What a script of ampscope's own states of itself, in its process: a script gets no parameter.
STATED: list[Observation] = []


class ScriptRecorder:
    """Records one run of a script; :meth:`watching` around it, then :meth:`observations`."""

    def __init__(
        self,
        own_folder: str,
        cadence: Cadence,
        on_optimizer_step: Callable[[int], None],
        skip_to: int = 0,
        op_step: int | None = None,
    ) -> None:
        """``on_optimizer_step`` gets the number of optimizer steps so far. The instruments are put
        on at the first forward after ``skip_to`` of them. ``op_step``: None, or digests of the
        run's tensors are wanted, and in this step of the ops' results
        (:mod:`ampscope.capture.script.run_digests`)."""
        self.lines = SourceLines(own_folder)
        self.failures = Failures()
        self.paths = ModulePaths(self.failures)
        self.watch = OpWatch(
            self.paths, self.lines, OP_BUDGET, self._op, PREPARES, self._half_begins
        )
        self.window = RecordedWindow()
        self.histograms = ScriptHistograms(self.paths, cadence)
        self.ledger = DtypeLedger(self.lines, self._region)
        self.digests: RunDigests | None = None
        if op_step is not None:
            self.digests = RunDigests(self.paths, self.histograms, self.watch.names, op_step)
        calls, watch = Calls(self.lines), self.watch
        self.steps = OptimizerSteps(
            calls,
            watch.taint_of,
            watch.writes,
            self.histograms if self.digests is None else self.digests,
            self._optimizer_stepped,
        )
        self.sites = HalfSites(self.lines, self.paths, watch, self.steps)
        self.precision = OpPrecision()
        self.requests = HalfRequests(self.lines)
        self._traces = cadence.trace > 0
        self._line_uses = LineUses(self.watch.place)
        self.line_digests: LineDigests | None = None
        self.errors = RaisedErrors(self.lines, self.steps)
        self.log = CallLog(calls, watch, self.steps, self.errors.raised)
        self.scans = ScriptScans(self.steps)
        self.started = time.perf_counter()
        self.eval_nonfinite = False
        self.eval_module = ""
        self.eval_taint = -1
        self.eval_nan = self.eval_inf = 0
        self._on_optimizer_step = on_optimizer_step
        self._cpu_s = [0.0, 0.0]  # of this process, at the end of the first step and of the last
        self._steps_timed = 0
        self.is_light = False  # ops are seen in some steps, and others take less time
        self._device: torch.device | None = None
        self.skip = SkipTo(skip_to, on_optimizer_step)

    def _region(self) -> tuple[str, str]:
        """Dtype and line of the autocast region that is open."""
        dtype = self.watch.autocast
        calls = (c for c in reversed(self.log.calls) if c.name == "autocast" and c.dtype == dtype)
        found = next(calls, None) if dtype else None
        return dtype, "" if found is None else found.line

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """All instruments on; all off on exit, whatever happens."""
        with contextlib.ExitStack() as stack:
            if self.digests is not None:
                stack.enter_context(self.ledger.watching(self.digests))
            stack.enter_context(self.paths)
            stack.enter_context(self.requests.watching())
            stack.enter_context(self.sites.watching())
            if self.skip.is_waiting:
                stack.enter_context(self.skip.until(lambda: self._put_on(stack)))
            else:
                self._put_on(stack)
            yield

    def _put_on(self, stack: contextlib.ExitStack) -> None:
        """The instruments, until ``stack`` is closed."""
        # Global pre-hooks get no keyword arguments, and many models take their batch in them.
        patches = stack.enter_context(ContainedPatches(self.failures, "calls of modules"))
        patches.wrap(nn.Module, "__call__", self._call)
        self.watch.reads.wrap(patches, lambda: self.watch.enabled)
        # After ``paths``, which has left the module when this is called.
        after = self.failures.hook("what modules returned", self._after_forward)
        stack.enter_context(FORWARD_ALWAYS.subscribe(after))
        if self.skip.passed:
            self.steps.begin_at(self.skip.passed)
            self.watch.new_step(self.skip.passed)
            self.histograms.begin_at(self.skip.passed)
        stack.enter_context(self.histograms)
        stack.enter_context(self.log)
        self.log.resume()
        stack.enter_context(self.watch)

    def switch_off(self) -> None:
        """Look at no further op: the script has ended, or this is a fork of its process."""
        self.watch.enabled = self.sites.enabled = False
        self.histograms.switch_off()
        if self.digests is not None:
            self.digests.switch_off()

    def so_far(self) -> list[Observation]:
        """Everything recorded, closed as if the script were killed now."""
        return self._closed(self.outcome("killed"))

    def lighten(self) -> None:
        """From here on record losses, gradients, steps and casts alone, none of which needs to see
        each op. Between two steps."""
        self.switch_off()
        self.sites.enabled = True
        self.scans.knows_ops = False
        self.watch.leave()

    def look_again(self) -> None:
        """Each op is seen again. Between two steps."""
        self.scans.knows_ops = True
        self.watch.come_back()

    def only_steps(self, outcome: Outcome) -> list[Observation]:
        """From here on record as :meth:`lighten` says. What was recorded so far, closed with
        ``outcome``."""
        self.lighten()
        count = len(self.scans.records)
        found = self.observations(outcome)
        del self.scans.records[count:]
        return found

    def observations(self, outcome: Outcome) -> list[Observation]:
        """Everything recorded, and the models' last state, closed with the outcome."""
        self.scans.at_end()
        return self._closed(outcome)

    def _closed(self, outcome: Outcome) -> list[Observation]:
        # The call log asks for the loss's taints at each backward, the steps for their gradients'.
        bad = [
            dataclasses.replace(
                record,
                reached_loss=record.id in self.steps.loss_taints,
                reached_gradient=record.reached_gradient
                or record.id in self.steps.gradients.taints
                or record.id in self.steps.replaced.taints,
            )
            for record in self.watch.records()
        ]
        return [
            *self.log.calls,
            *self.watch.reads.calls(len(self.log.calls)),
            *self.steps.records,
            *self.steps.gradients.records,
            *self.steps.changes.records,
            *self.steps.replaced.records,
            *self.scans.records,
            *self.scans.unstepped(),
            *bad,
            *self.watch.uses.records(),
            *self.watch.copies.records(),
            *self.watch.model_copies.records(self.steps.count),
            *self._line_uses.records(self.sites.files()),
            *self.sites.records(),
            *self.requests.records(),
            *STATED,
            *([] if self.digests is None else self.digests.records()),
            *([] if self.line_digests is None else self.line_digests.records()),
            *([] if self.digests is None else self.ledger.records()),
            outcome,
        ]

    def _op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not self.watch.in_optimizer:
            self.precision.record(func, args, kwargs, out)
        if is_capturing():  # numbers come with the replays
            return
        with self.sites.failures.noted("where numbers become half precision"):
            self.sites.after_op(func, args, kwargs, out)
        if self.digests is not None and not self.watch.in_optimizer:
            self.digests.after_op(func, args, kwargs, out)
        if self.line_digests is not None and not self.watch.in_optimizer:
            first = self.steps.count == self.skip.recorded_from or self.window.holds(
                self.steps.count, 1
            )
            if first:
                self.line_digests.after_op(func, out)
        if self._traces:
            self.histograms.record_op(func, args, kwargs, out)
            steps = self.steps.count - self.skip.recorded_from
            looks = steps < line_uses.STEPS or self.window.holds(self.steps.count, line_uses.STEPS)
            if looks and not self.watch.in_optimizer:
                self._line_uses.record(func, args, kwargs, out)

    def _call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Inside vmap and grad of torch.func tensors have no values to look at; what is done inside
        # jit.trace becomes part of the traced model.
        if torch.compiler.is_compiling():  # an export: first, so that no more of this is traced
            return original(module, *args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() or torch._C._get_tracing_state():
            return original(module, *args, **kwargs)
        is_outermost = not self.paths.stack and torch._C._current_autograd_node() is None
        if is_outermost and not is_capturing():
            self._before_forward(module, args, kwargs)
        try:
            return original(module, *args, **kwargs)
        except Exception as error:
            outermost = not self.paths.stack
            self.errors.left_module(error, self.paths.path(module), is_outermost=outermost)
            raise
        finally:
            if is_outermost:
                self.watch.evaluations.leave()

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        self.steps.drop_left_steps()
        waits = not self.watch.trains and _begins_a_step()
        if waits and any(p.requires_grad for _, p in parameters(module)):
            self.watch.training_begins()
        if self.digests is None:  # which are taken of every op
            self.watch.evaluations.enter(module)
        # Asked here and not in each module: activation checkpointing runs its inside without.
        self.histograms.models.is_training = torch.is_grad_enabled()
        if not self.scans.records:
            with self._not_watched():
                self.log.calls.append(inputs_call(len(self.log.calls), args, kwargs))
        if self.histograms.models.is_training and module.training:
            self.watch.reads.forward()
        with self._not_watched():
            root = self.paths.root_of(module)
            self.scans.before_forward(root, module, args, kwargs)
            if self.digests is not None and self.histograms.models.is_training:
                self.digests.before_forward(root, module, args, kwargs)
                self.ledger.model(unwrapped(root), self.digests.prefix(root))

    @contextlib.contextmanager
    def _not_watched(self) -> Iterator[None]:
        """What ampscope itself computes is none of the script's ops."""
        before, self.watch.enabled = self.watch.enabled, False
        try:
            yield
        finally:
            self.watch.enabled = before

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        if is_capturing():
            return
        if self.digests is not None:
            self.digests.after_forward(module, output)
            if torch.is_grad_enabled() and self.steps.count < LEDGER_STEPS:
                self.ledger.activation(self.digests.path(module), module, output)
        if self.paths.stack or torch.is_grad_enabled() or not self.steps.count:
            return
        with self._not_watched():
            for tensor in floating_tensors(output):
                if not all_finite(tensor):
                    self._evaluated_badly(module, tensor)

    def _evaluated_badly(self, module: nn.Module, tensor: torch.Tensor) -> None:
        has_nan = bool(torch.isnan(plain(tensor)).any())
        is_first_nan = has_nan and not self.eval_nan
        self.eval_nan += has_nan
        self.eval_inf += not has_nan
        found = self.watch.taint_of(tensor)
        taint = -1 if found is None else found
        # The first one counts; but an output of -inf that no op is to blame for hides nothing.
        if not self.eval_nonfinite or (self.eval_taint < 0 and (is_first_nan or taint >= 0)):
            self.eval_nonfinite, self.eval_module = True, type(module).__name__
            self.eval_taint = taint

    @property
    def device(self) -> torch.device:
        """Where the script's parameters are: a GPU, if any of them is there; without parameters the
        current device. No script is on a GPU that has not started CUDA."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return torch.device("cpu")
        if self._device is None or self._device.type == "cpu":
            stepped = (p for optimizer in self.steps.optimizers for p in parameters_of(optimizer))
            of_models = (p for model in self.paths.models() for _, p in parameters(model))
            places = [p.device for p in (*stepped, *of_models)]
            on_cuda = (place for place in places if place.type == "cuda")
            here = torch.device("cpu" if places else "cuda")
            self._device = next(on_cuda, here)
            if self._device.type == "cuda" and self._device.index is None:
                self._device = torch.device("cuda", torch.cuda.current_device())
        return self._device

    def _optimizer_stepped(self, count: int) -> None:
        self._cpu_s[self._steps_timed > 0] = time.process_time()
        self._steps_timed += 1
        with self._not_watched(), self.failures.contained("parameters without an optimizer"):
            self.scans.after_step()
        record = self.steps.records[-1]
        scale = record.scale if record.scaler else 1.0
        self.histograms.optimizer_stepped(count, scale)
        known = self.steps.optimizers
        named = (o for o in known if self.steps.optimizer_name(o) == record.optimizer)
        optimizer = next(named, None)
        with self._not_watched():
            self.sites.failures.call("an optimizer in half", self.sites.stepped, optimizer)
            self._digested(count, scale, optimizer)
        self.watch.new_step(count)
        self.watch.reads.stepped()
        self._on_optimizer_step(count)

    def _half_begins(self) -> None:
        """The steps that are looked at begin."""
        self.window.begin_at(self.steps.count)
        self.steps.look_anew()
        self.scans.look_anew()

    def _digested(self, count: int, scale: float, optimizer: Any) -> None:
        """A step has ended that is to be compared."""
        if self.digests is None:
            return
        self.digests.optimizer_stepped(count, scale, optimizer)
        if optimizer is not None and count <= LEDGER_STEPS:
            self.ledger.states(optimizer, self.digests.names)
        self.ledger.look_around(self.steps.optimizers)
        self.ledger.step = count

    def _gaps(self, uses_half: bool) -> tuple[str, ...]:
        """What the script ran that a CPU computes otherwise than CUDA (`policy.op_lists`)."""
        ops = set(self.watch.gap_ops)
        held = (module for model in self.paths.models() for _, module in modules(model))
        if uses_half and any(issubclass(type(module), nn.RNNBase) for module in held):
            ops.add((op_lists.RNN, "fp16"))
        return tuple(gap.id for gap in op_lists.met_by(ops))

    @property
    def _step_cpu_s(self) -> float:
        """Unlike the time on the clock it hardly depends on what else runs on the machine."""
        if self.is_light or self._steps_timed < 2 or self.device.type != "cpu":
            return 0.0
        return (self._cpu_s[1] - self._cpu_s[0]) / (self._steps_timed - 1)

    def outcome(self, ended: str, **facts: object) -> Outcome:
        """The outcome so far, with what the script was seen to use."""
        records = self.steps.records
        autocast = sorted({c.dtype for c in self.log.calls if c.name == "autocast" and c.dtype})
        held = (p for model in self.paths.models() for _, p in parameters(model))
        half = sorted({dtype_name(p.dtype) for p in held if p.dtype in HALF})
        flop_dtypes, flop_counts = self.precision.flops()
        digests_s = 0.0 if self.digests is None else self.digests.elapsed_s
        own_s = self.histograms.elapsed_s + digests_s  # none of the script's
        calls = Counter(c.name for c in self.log.calls)
        errors = facts if "error_type" in facts else {**self.errors.caught(), **facts}
        return Outcome(
            ended=ended,
            steps=self.steps.count - self.skip.recorded_from,
            slept=self.skip.passed,
            half_from=self.window.first or 0,
            elapsed_s=time.perf_counter() - self.started - own_s,
            forwards=self.watch.reads.forwards,
            backwards=calls["backward"] or calls["grad"],
            models=tuple(type(m).__name__ for m in self.paths.models()),
            optimizers=tuple(type(o).__name__ for o in self.steps.optimizers),
            scalers=tuple(f"scaler{i}" for i in range(len(self.steps.scaler_numbers.known))),
            uses_autocast="+".join(autocast),
            uses_half_model="+".join(half),
            last_loss=records[-1].loss if records else None,
            eval_nonfinite=self.eval_nonfinite,
            eval_module=self.eval_module,
            eval_taint=self.eval_taint,
            eval_nan=self.eval_nan,
            eval_inf=self.eval_inf,
            traced_ops=self.watch.seen_ops,
            flop_dtypes=flop_dtypes,
            flop_counts=flop_counts,
            half_ops=self.precision.half_ops,
            peak_bytes=peak_bytes(self.device),
            step_cpu_s=self._step_cpu_s,
            gaps=self._gaps(bool(autocast or half)),
            **errors,  # error_* and exit_code, checked by the dataclass
        )


class SkipTo(StepListener):
    """Counts optimizer steps, taken or skipped, and does no more until ``steps`` have passed.

    The instruments are put on at the next call of an outermost module: there a step begins, in the
    thread that trains, and none of torch's calls is half done.
    """

    def __init__(self, steps: int, on_step: Callable[[int], None]) -> None:
        self.is_waiting = steps > 0
        self.passed = 0  # steps that went by unrecorded
        self.first_s = 0.0  # seconds from the start to the end of the first step
        self.elapsed_s = 0.0  # … to the end of the last that went by
        self._steps = steps
        self._on_step = on_step
        self._started = time.monotonic()

    @property
    def recorded_from(self) -> int:
        """The number of the first recorded step; 0 while it waits, as none is."""
        return 0 if self.is_waiting else self.passed

    @contextlib.contextmanager
    def until(self, wake: Callable[[], None]) -> Iterator[None]:
        """Waits from here on; ``wake`` puts the instruments on."""
        with StepEvents(self), Patches() as patches:
            patches.wrap(nn.Module, "__call__", functools.partial(self._call, wake))
            yield

    def after_step(self, optimizer: Any, scaler: Any) -> None:
        self._count()

    def after_scaler_step(
        self, optimizer: Any, scaler: Any, *, stepped: bool, raised: bool
    ) -> None:
        if not stepped:
            self._count()

    def _count(self) -> None:
        if self.is_waiting:
            self.passed += 1
            self.elapsed_s = time.monotonic() - self._started
            self.first_s = self.first_s or self.elapsed_s
            self._on_step(self.passed)

    def _call(
        self, wake: Callable[[], None], original: Any, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.is_waiting or self.passed < self._steps or not _begins_a_step():
            return original(module, *args, **kwargs)
        self.is_waiting = False
        wake()
        return nn.Module.__call__(module, *args, **kwargs)  # now with the instruments' wrappers

    @property
    def note(self) -> str:
        """How long it waited and why; "" without --skip-to."""
        if not self.passed:
            return ""
        return (
            f"Nothing was recorded of the first {self.passed:,} optimizer steps (--skip-to "
            f"{self._steps:,}): they ran in {self.elapsed_s:,.1f} s, of which the first took "
            f"{self.first_s:,.1f} s from the script's start. Controls apply from the start on."
        )


def _begins_a_step() -> bool:
    """Whether a call now is a training's forward, and no recomputation within a backward."""
    return torch.is_grad_enabled() and not in_backward() and not torch.compiler.is_compiling()


class RecordedWindow:
    """The steps that are looked at in full, from the first in which half precision takes part."""

    def __init__(self) -> None:
        self.first: int | None = None  # None: no half precision took part so far
        self._begun_at = 0.0

    def begin_at(self, step: int) -> None:
        """Half precision takes part in ``step``, which has begun."""
        self.first, self._begun_at = step, time.monotonic()

    def holds(self, step: int, count: int) -> bool:
        """Whether ``step`` is one of the first ``count``."""
        return self.first is not None and 0 <= step - self.first < count

    def is_over(self, steps: int, count: int, lasts_s: float) -> bool:
        """Whether ``count`` of the ``steps`` that have ended lie in it, and it has lasted so
        long."""
        if self.first is None:
            return False
        return steps - self.first >= count and time.monotonic() - self._begun_at >= lasts_s

    @property
    def note(self) -> str:
        """Where it begins; "" where that is the first step."""
        if not self.first:
            return ""
        return (
            f"Half precision takes part from step {self.first:,} on: the steps that were looked at "
            "are counted from there. Of the steps before, ops and histograms may be missing."
        )


class RaisedErrors:
    """Errors out of a model's forward pass or a backward pass, whether or not the script lets them
    through: many training loops catch what they take for a lack of memory, and lose every step to
    it in silence. Counts them, and keeps the first as fields of ``Outcome``; ``steps`` counts the
    steps."""

    def __init__(self, lines: SourceLines, steps: OptimizerSteps) -> None:
        self.count = 0
        self._lines = lines
        self._steps = steps
        self._first: dict[str, Any] = {}

    def left_module(self, error: Exception, path: str, *, is_outermost: bool) -> None:
        """``error`` leaves the forward pass of the module at ``path``, innermost first."""
        error.__dict__.setdefault(_MARK, path)
        if is_outermost:
            self.raised(error)

    def raised(self, error: Exception) -> None:
        """``error`` goes to the script's own code."""
        path = error.__dict__.setdefault(_MARK, "")
        memory = isinstance(error, torch.OutOfMemoryError)
        if memory or not isinstance(error, RuntimeError) or _COUNTED in error.__dict__:
            return
        error.__dict__[_COUNTED] = True
        self.count += 1
        if not self._first:
            place, function = script_ending.place_of(error, self._lines)
            self._first = {
                "error_type": type(error).__name__,
                "error_text": str(error)[:MAX_TEXT],
                # The script's own frames may all lie above: the error has not come to them yet.
                "error_line": line_name(place if place[0] else self._lines.where()),
                "error_in_function": function,
                "error_module": path,
                "error_step": self._steps.count,
            }

    def module_of(self, error: BaseException) -> str:
        """Path of the innermost module in whose forward ``error`` was raised, or ""."""
        return str(error.__dict__.get(_MARK, ""))

    def caught(self) -> dict[str, Any]:
        """Their number, and where they come often the first, as fields of an outcome that no error
        ended."""
        often = self.count >= max(MIN_CAUGHT, CAUGHT_SHARE * (self._steps.count + self.count))
        return {**(self._first if often else {}), "errors_caught": self.count}


class ScriptWriting:
    """Writes a script's observations and steps to its run while it goes on: it may be killed at any
    instant.

    Each time everything so far is written anew, over what was there, closed with an outcome
    "killed" that the real one replaces. The time between two writings follows what one takes, so
    that a run spends a twentieth of its time on it, however much there is to write.
    """

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self.steps = 0  # seen so far
        self._steps = 0  # written so far
        self._op_sets: dict[int, int] = {}  # of steps that wait to be written
        self._pace = Pace(WRITING_SHARE, longest_s=LONGEST_PAUSE_S)

    def write_if_due(self, recorder: ScriptRecorder) -> None:
        """Write what there is, unless that was done a moment ago."""
        self.steps = recorder.steps.count
        started = time.monotonic()
        if self.steps > FIRST_STEPS and not self._pace.is_due(started):
            return
        self.write(recorder.so_far(), recorder.histograms.take())
        self._pace.wrote(started, time.monotonic() - started)

    def write(
        self,
        observations: Sequence[Observation],
        measured: ScriptMeasurements,
        *,
        last: bool = False,
    ) -> None:
        """Write all of a run's observations over those that were there, and its new steps.

        A fused optimizer shows only after its step that it left it out, so the newest step waits.
        """
        self._writer.add_observations(observations)
        self._add(measured)
        steps = [o for o in observations if isinstance(o, OptimizerStep)]
        settled = steps if last else steps[:-1]
        for record in settled[self._steps :]:
            self._writer.add_step(
                StepRecord(
                    step=record.step,
                    loss=record.loss,
                    scale=record.scale if record.scaler else None,
                    skipped=record.skipped,
                    grad_norm=record.grad_norm if not record.grad_nonfinite else float("nan"),
                    lr=record.lr,
                    moved_share=record.moved_share,
                    op_set=self._op_sets.pop(record.step, None),
                    ended_at=record.ended_at,
                    unclipped_norm=record.unclipped_norm,
                )
            )
        self._steps = max(self._steps, len(settled))
        self._writer.flush()

    def _add(self, measured: ScriptMeasurements) -> None:
        writer = self._writer
        writer.add_modules(measured.modules)
        writer.add_nonfinite(measured.nonfinite)
        for frame in measured.frames:
            writer.add_frame(frame)
        for op_set, ops in measured.ops:
            writer.add_ops(op_set, ops)
        self._op_sets.update(measured.op_sets)
