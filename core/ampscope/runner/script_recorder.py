"""Everything that watches an untouched script; the result is a list of observations.

:class:`ScriptRecorder` puts the instruments of ``capture/script`` together. :class:`ScriptWriting`
keeps what was seen while the script runs, for it may be killed. :class:`ScriptScans` looks at
models and batches, :class:`RaisedErrors` at errors out of forward and backward passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampscope.capture.failures import ContainedPatches, Failures
from ampscope.capture.global_hooks import FORWARD_ALWAYS
from ampscope.capture.own_ops import own_ops
from ampscope.capture.script import line_uses
from ampscope.capture.script.call_log import CallLog
from ampscope.capture.script.calls import Calls
from ampscope.capture.script.dtype_ledger import DtypeLedger
from ampscope.capture.script.line_uses import LineUses
from ampscope.capture.script.module_paths import ModulePaths, OpPrecision, unwrapped
from ampscope.capture.script.op_taint import PROVENANCE
from ampscope.capture.script.op_watch import OpWatch
from ampscope.capture.script.optimizer_facts import scan, scan_model
from ampscope.capture.script.optimizer_steps import OptimizerSteps, StepInstruments
from ampscope.capture.script.run_digests import RunDigests
from ampscope.capture.script.script_histograms import ScriptHistograms, ScriptMeasurements
from ampscope.capture.tensors import (
    HALF,
    all_finite,
    floating_tensors,
    holds_numbers,
    in_backward,
    is_capturing,
    plain,
    readable,
)
from ampscope.capture.training_events import StepEvents, StepListener
from ampscope.capture.user_objects import buffers, modules, parameters, parameters_of
from ampscope.numerics.formats import dtype_name
from ampscope.observations import Call, Observation, OptimizerStep, Outcome, Scan
from ampscope.patches import Patches
from ampscope.policy import op_lists
from ampscope.records import Cadence, StepRecord
from ampscope.runner import script_ending
from ampscope.runner.controls import HalfRequests
from ampscope.runner.device import peak_bytes
from ampscope.source_lines import SourceLines, line_name
from ampscope.store.writer import FIRST_STEPS, Pace, RunWriter

LEDGER_STEPS = 3  # first ones, in which activations and state get their dtypes
OP_BUDGET = 400_000  # ops looked at: about 15 s of watching on a slow core
PREPARES = 3_000  # and of those before a training begins
ADDED: list[Observation] = []  # what a script of ampscope's own says of itself, in its process


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
        self.window = Window()
        self.histograms = ScriptHistograms(self.paths, cadence)
        calls, watch = Calls(self.lines), self.watch
        self.steps = OptimizerSteps(
            calls, watch.taint_of, watch.writes, self._digesting(op_step), self._optimizer_stepped
        )
        self.precision = OpPrecision()
        self.requests = HalfRequests(self.lines)
        self._traces = cadence.trace > 0
        self._line_uses = LineUses(self.watch.place)
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
        self._device: torch.device | None = None
        self.sleep = Sleep(skip_to, on_optimizer_step)

    def _digesting(self, op_step: int | None) -> StepInstruments:
        """What looks at each step: the histograms, and the digests where they are wanted."""
        self.ledger = DtypeLedger(self.lines, self._region)
        self.digests: RunDigests | None = None
        if op_step is None:
            return self.histograms
        self.digests = RunDigests(self.paths, self.histograms, self.watch.names, op_step)
        return self.digests

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
            if self.sleep.is_asleep:
                stack.enter_context(self.sleep.until(lambda: self._put_on(stack)))
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
        if self.sleep.passed:
            self.steps.begin_at(self.sleep.passed)
            self.watch.new_step(self.sleep.passed)
            self.histograms.begin_at(self.sleep.passed)
        stack.enter_context(self.histograms)
        stack.enter_context(self.log)
        self.log.resume()
        stack.enter_context(self.watch)

    def switch_off(self) -> None:
        """Look at no further op: the script has ended, or this is a fork of its process."""
        self.watch.enabled = False
        self.histograms.switch_off()
        if self.digests is not None:
            self.digests.switch_off()

    def so_far(self) -> list[Observation]:
        """Everything recorded, closed as if the script were killed now."""
        return self._closed(self.outcome("killed"))

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
                reached_gradient=record.id in self.steps.gradients.taints
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
            *bad,
            *self.watch.uses.records(),
            *self._line_uses.records(),
            *self.requests.records(),
            *ADDED,
            *self._to_compare(),
            outcome,
        ]

    def _to_compare(self) -> list[Observation]:
        if self.digests is None:
            return []
        return [*self.digests.records(), *self.ledger.records()]

    def _op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not self.watch.in_optimizer:
            self.precision.record(func, args, kwargs, out)
        if is_capturing():  # numbers come with the replays
            return
        if self.digests is not None and not self.watch.in_optimizer:
            self.digests.after_op(func, args, kwargs, out)
        if self._traces:
            self.histograms.record_op(func, args, kwargs, out)
            steps = self.steps.count - self.sleep.recorded_from
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
        record = self.steps.records[-1]
        scale = record.scale if record.scaler else 1.0
        self.histograms.optimizer_stepped(count, scale)
        if self.digests is not None:
            with self._not_watched():
                known = self.steps.optimizers
                named = (o for o in known if self.steps.optimizer_name(o) == record.optimizer)
                self._digested(count, scale, next(named, None))
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

    @property
    def _own_s(self) -> float:
        """Time spent in what is none of the script's."""
        digests_s = 0.0 if self.digests is None else self.digests.elapsed_s
        return self.histograms.elapsed_s + digests_s

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
        if self._steps_timed < 2 or self.device.type != "cpu":
            return 0.0
        return (self._cpu_s[1] - self._cpu_s[0]) / (self._steps_timed - 1)

    def outcome(self, ended: str, **facts: object) -> Outcome:
        """The outcome so far, with what the script was seen to use."""
        records = self.steps.records
        autocast = sorted({c.dtype for c in self.log.calls if c.name == "autocast" and c.dtype})
        half = sorted(
            {
                dtype_name(p.dtype)
                for m in self.paths.models()
                for _, p in parameters(m)
                if p.dtype in HALF
            }
        )
        flop_dtypes, flop_counts = self.precision.flops()
        calls = Counter(c.name for c in self.log.calls)
        errors = facts if "error_type" in facts else {**self.errors.caught(), **facts}
        return Outcome(
            ended=ended,
            steps=self.steps.count - self.sleep.recorded_from,
            slept=self.sleep.passed,
            half_from=self.window.first or 0,
            elapsed_s=time.perf_counter() - self.started - self._own_s,
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


class Sleep(StepListener):
    """Counts optimizer steps, taken or skipped, and does no more until ``steps`` have passed.

    The instruments are put on at the next call of an outermost module: there a step begins, in the
    thread that trains, and none of torch's calls is half done.
    """

    def __init__(self, steps: int, on_step: Callable[[int], None]) -> None:
        self.is_asleep = steps > 0
        self.passed = 0  # steps that went by unrecorded
        self.first_s = 0.0  # seconds from the start to the end of the first step
        self.elapsed_s = 0.0  # … to the end of the last that went by
        self._steps = steps
        self._on_step = on_step
        self._started = time.monotonic()

    @property
    def recorded_from(self) -> int:
        """The number of the first recorded step; 0 while asleep, as none is."""
        return 0 if self.is_asleep else self.passed

    @contextlib.contextmanager
    def until(self, wake: Callable[[], None]) -> Iterator[None]:
        """Asleep from here on; ``wake`` puts the instruments on."""
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
        if self.is_asleep:
            self.passed += 1
            self.elapsed_s = time.monotonic() - self._started
            self.first_s = self.first_s or self.elapsed_s
            self._on_step(self.passed)

    def _call(
        self,
        wake: Callable[[], None],
        original: Any,
        module: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self.is_asleep or self.passed < self._steps or not _begins_a_step():
            return original(module, *args, **kwargs)
        self.is_asleep = False
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


class Window:
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


def _begins_a_step() -> bool:
    """Whether a call now is a training's forward, and no recomputation within a backward."""
    return torch.is_grad_enabled() and not in_backward() and not torch.compiler.is_compiling()


# Keeps what a script's run has shown while it goes on: it may be killed at any instant.
#
# Each time everything so far is written anew, over what was there, closed with an outcome "killed"
# that the real one replaces. The time between two writings follows what one takes, so that a run
# spends a twentieth of its time on it, however much there is to write.


WRITING_SHARE = 0.05
LONGEST_PAUSE_S = 10.0


class ScriptWriting:
    """Writes a script's observations and steps to its run."""

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
            self._writer.add_step(_step(record, self._op_sets.pop(record.step, None)))
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


def _step(record: OptimizerStep, op_set: int | None) -> StepRecord:
    return StepRecord(
        step=record.step,
        loss=record.loss,
        scale=record.scale if record.scaler else None,
        skipped=record.skipped,
        grad_norm=record.grad_norm if not record.grad_nonfinite else float("nan"),
        lr=record.lr,
        moved_share=record.moved_share,
        op_set=op_set,
        ended_at=record.ended_at,
        unclipped_norm=record.unclipped_norm,
    )


# What a script's models and batches look like: at first sight, on the way in, and at the end.
#
# A NaN that came with the data or the initial weights is no fault of any op, so these are looked
# at before the first op sees them.


MAX_ALIKE = 10  # models with the same names: a copy for each evaluation, one for each fold
MAX_FIRST_SIGHT_NUMEL = 20_000_000  # weights kept to see what moved by the end
MAX_BATCH_SCANS = 2_000


@dataclasses.dataclass(slots=True)
class _Seen:
    """A model at its first sight. Its modules' own tables of tensors outlive it, as those of a
    model do that is a local name of ``main()``: the tensors can be read after the script's end."""

    model: weakref.ref[nn.Module]
    kept: dict[str, Tensor]  # values of the parameters; none of a model that is too large
    parameters: list[tuple[str, dict[str, nn.Parameter | None]]]
    buffers: list[tuple[str, dict[str, Tensor | None]]]


def _named(
    tables: Iterable[tuple[str, Mapping[str, Tensor | None]]],
) -> Iterator[tuple[str, Tensor]]:
    """As ``named_parameters`` gives them, each tensor once."""
    seen: set[int] = set()
    for prefix, table in tables:
        for name, tensor in table.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def _has_moved(parameter: Tensor, first: Tensor | None) -> bool:
    now = readable(parameter)
    if now is None or first is None or now.shape != first.shape:
        return False
    with own_ops():
        return not torch.equal(plain(now).detach().float(), plain(first).float())


class ScriptScans:
    """Scans of one run, in :attr:`records`."""

    def __init__(self, steps: OptimizerSteps) -> None:
        self.records: list[Scan] = []
        self._steps = steps
        self._first_sight: dict[int, _Seen] = {}
        self._gone: dict[tuple[bool, tuple[str, ...]], _Seen] = {}
        self._alike: Counter[tuple[str, ...]] = Counter()
        self._batches = 0

    def look_anew(self) -> None:
        """As many batches are looked at from here on as from the start."""
        self._batches = 0

    def before_forward(
        self, root: nn.Module, module: nn.Module, args: object, kwargs: object
    ) -> None:
        """A module is called from outside any other; ``root`` is the outermost that holds it."""
        self._see_model(root)
        if self._batches >= MAX_BATCH_SCANS:
            return
        for n, tensor in enumerate(floating_tensors([args, kwargs])):
            if not tensor.numel():
                continue
            if tensor.grad_fn is not None:
                continue  # computed from weights, such as a prediction that a loss module gets
            if not hasattr(tensor, PROVENANCE) or not all_finite(tensor):
                self._batches += 1
                name = f"input {n} of {type(module).__name__}"
                self._add("batch", "batch", name, tensor)

    def at_end(self) -> None:
        """Every model that is still alive, and how far its weights moved; of those that are gone
        with the function that made them the last of its kind, if it moved."""
        trained = self._trained()
        for seen in list(self._first_sight.values()):
            model = seen.model()
            if model is None:
                continue
            self._end_of(parameters(model), buffers(model), seen.kept, trained)
            self._gone.pop(self._kind_of(seen), None)
        for seen in list(self._gone.values()):  # a model may go meanwhile
            named = list(_named(seen.parameters))
            if any(_has_moved(p, seen.kept.get(name)) for name, p in named):
                self._end_of(named, _named(seen.buffers), seen.kept, trained)

    def _end_of(
        self,
        weights: Iterable[tuple[str, Tensor]],
        others: Iterable[tuple[str, Tensor]],
        kept: dict[str, Tensor],
        trained: set[int],
    ) -> None:
        for name, parameter in weights:
            now = readable(parameter)
            if now is None:
                continue  # a packed one, or given away to free its memory
            first = kept.get(name)
            same = first is not None and first.shape == now.shape
            kind = "parameter" if id(parameter) in trained else "frozen"
            self._add("end", kind, name, parameter, first if same else None)
        for name, buffer in others:
            if buffer.is_floating_point() and holds_numbers(buffer) and buffer.numel():
                self._add("end", "buffer", name, buffer)

    def _see_model(self, root: nn.Module) -> None:
        root = unwrapped(root)
        held = parameters(root)
        if id(root) in self._first_sight or any(p.is_meta or is_lazy(p) for _, p in held):
            return  # where nothing is in memory there is nothing to see yet
        for name, parameter in held:
            self._steps.gradients.names.setdefault(id(parameter), name)
        names = tuple(name for name, _ in held)
        self._alike[names] += 1
        is_one_more = self._alike[names] > MAX_ALIKE  # seen, and looked at only if it lives on
        kept: dict[str, Tensor] = {}
        numel = sum(p.numel() for _, p in held)
        if numel <= MAX_FIRST_SIGHT_NUMEL and not is_one_more:
            values = ((name, readable(p)) for name, p in held)
            kept = {name: value.clone() for name, value in values if value is not None}
        key = id(root)
        gone = weakref.ref(root, lambda _: self._is_gone(key))
        every = modules(root) if kept else []
        self._first_sight[key] = _Seen(
            gone,
            kept,
            [(name, module._parameters) for name, module in every],
            [(name, module._buffers) for name, module in every],
        )
        if not is_one_more:
            self.records += scan_model("start", root, self._trained(), self._steps.count)

    def _is_gone(self, key: int) -> None:
        """Nothing is computed here: a model may go in the middle of any op."""
        seen = self._first_sight.pop(key, None)
        if seen is not None and seen.kept:
            self._gone[self._kind_of(seen)] = seen

    def _kind_of(self, seen: _Seen) -> tuple[bool, tuple[str, ...]]:
        """Alike are models with the same names: a trained one and its average are not."""
        trained = self._trained()
        held = (id(t) for _, table in seen.parameters for t in table.values())
        return any(key in trained for key in held), tuple(seen.kept)

    def _trained(self) -> set[int]:
        """Ids of the parameters that an optimizer has."""
        return {id(p) for o in self._steps.optimizers for p in parameters_of(o)}

    def _add(
        self, moment: str, kind: str, name: str, tensor: Tensor, first: Tensor | None = None
    ) -> None:
        self.records.append(scan(moment, kind, name, tensor, self._steps.count, first))


def inputs_call(seq: int, args: object, kwargs: object) -> Call:
    """A sum over what the first model is given first: the same sum in another run of the script
    means that it repeats itself. NaN, as missing values of a table, counts as 0: a sum that is NaN
    would be equal to none."""
    tensors = floating_tensors([args, kwargs])
    numbers = (plain(t).detach().double() for t in tensors)
    total = sum(float(torch.nan_to_num(n, 0.0, 0.0, 0.0).sum()) for n in numbers)
    dtypes = "+".join(sorted({dtype_name(t.dtype) for t in tensors}))
    return Call(seq, 0, "inputs", value=total, dtype=dtypes)


# Errors out of a model's forward pass or a backward pass, whether or not the script lets them
# through: many training loops catch what they take for a lack of memory, and lose every step to it
# in silence.


MAX_TEXT = 2_000
# A caught error is reported with its text where it is frequent; once is a way to try things.
MIN_CAUGHT, CAUGHT_SHARE = 3, 0.05  # of the steps and the errors together
# On the error itself, because ids are used again: path of the innermost module; that it is counted.
_MARK, _COUNTED = "_ampscope_module", "_ampscope_counted"


class RaisedErrors:
    """Counts them, and keeps the first as fields of ``Outcome``; ``steps`` counts steps."""

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
