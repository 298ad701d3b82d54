"""Everything that watches an untouched script; the result is a list of observations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ampscope.capture.script.attempts import Attempts
from ampscope.capture.script.call_log import CallLog
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.op_precision import OpPrecision
from ampscope.capture.script.op_watch import OpWatch
from ampscope.capture.script.patches import Patches
from ampscope.capture.script.script_histograms import ScriptHistograms
from ampscope.capture.script.source_lines import SourceLines
from ampscope.capture.tensors import HALF, all_finite, floating_tensors, plain
from ampscope.formats import dtype_name
from ampscope.observations import Observation, Outcome
from ampscope.policy import gaps
from ampscope.records import Cadence
from ampscope.run.device import peak_bytes
from ampscope.run.half_requests import HalfRequests
from ampscope.run.raised_errors import RaisedErrors
from ampscope.run.script_scans import ScriptScans, inputs_call

OP_BUDGET = 400_000  # ops looked at: about 15 s of watching on a slow core


class ScriptRecorder:
    """Records one run of a script; :meth:`watching` around it, then :meth:`observations`."""

    def __init__(
        self, own_folder: str, cadence: Cadence, on_attempt: Callable[[int], None]
    ) -> None:
        self.lines = SourceLines(own_folder)
        self.paths = ModulePaths()
        self.watch = OpWatch(self.paths, self.lines, OP_BUDGET)
        self.attempts = Attempts(self.watch.taint_of, self.watch.writes)
        self.histograms = ScriptHistograms(self.paths, cadence)
        self.attempts.instruments = self.histograms
        self.precision = OpPrecision()
        self.requests = HalfRequests(self.lines)
        self._traces = cadence.trace > 0
        self.watch.on_op = self._op
        self.errors = RaisedErrors(self.lines, lambda: self.attempts.count)
        self.log = CallLog(self.watch, self.attempts, self.errors.raised)
        self.scans = ScriptScans(self.attempts)
        self.started = time.perf_counter()
        self.eval_nonfinite = False
        self.eval_module = ""
        self.eval_taint = -1
        self.eval_nan = self.eval_inf = 0
        self._on_attempt = on_attempt
        self.attempts.on_attempt_end = self._attempt_ended

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """All instruments on; all off on exit, whatever happens."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.paths)
            # Global pre-hooks get no keyword arguments, and many models take their batch in them.
            patches = Patches()
            patches.replace(nn.Module, "__call__", self._call)
            self.watch.reads.wrap(patches, lambda: self.watch.enabled)
            stack.callback(patches.undo)
            stack.enter_context(self.requests.watching())
            after = register_module_forward_hook(self._after_forward)
            stack.callback(after.remove)
            stack.enter_context(self.histograms)
            stack.enter_context(self.attempts)
            stack.enter_context(self.log)
            stack.enter_context(self.watch)
            yield

    def switch_off(self) -> None:
        """Look at no further op: the script has ended, or this is a fork of its process."""
        self.watch.enabled = False
        self.histograms.switch_off()

    def so_far(self) -> list[Observation]:
        """Everything recorded, closed as if the script were killed now."""
        return self._closed(self.outcome("killed"))

    def observations(self, outcome: Outcome) -> list[Observation]:
        """Everything recorded, and the models' last state, closed with the outcome."""
        self.scans.at_end()
        return self._closed(outcome)

    def _closed(self, outcome: Outcome) -> list[Observation]:
        bad = [
            dataclasses.replace(
                record,
                reached_loss=record.id in self.attempts.loss_taints,
                reached_gradient=record.id in self.attempts.gradient_taints,
            )
            for record in self.watch.records()
        ]
        return [
            *self.log.calls,
            *self.watch.reads.calls(len(self.log.calls)),
            *self.attempts.records,
            *self.attempts.gradients,
            *self.attempts.changes.records,
            *self.scans.records,
            *bad,
            *self.watch.uses.records(),
            *self.requests.records(),
            outcome,
        ]

    def _op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not self.watch.in_optimizer:
            self.precision.record(func, args, kwargs, out)
        if self._traces:
            self.histograms.record_op(func, args, kwargs, out)

    def _call(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Inside vmap and grad of torch.func tensors have no values to look at; what is done
            # inside jit.trace becomes part of the traced model.
            if torch.compiler.is_compiling():  # an export: first, so that no more of this is traced
                return original(module, *args, **kwargs)
            if torch._C._functorch.peek_interpreter_stack() or torch._C._get_tracing_state():
                return original(module, *args, **kwargs)
            if not self.paths.stack and torch._C._current_autograd_node() is None:
                self._before_forward(module, args, kwargs)
            try:
                return original(module, *args, **kwargs)
            except Exception as error:
                outermost = not self.paths.stack
                self.errors.left_module(error, self.paths.path(module), is_outermost=outermost)
                raise

        return wrapper

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        # Asked here and not in each module: activation checkpointing runs its inside without.
        self.histograms.models.is_training = torch.is_grad_enabled()
        if not self.scans.records:
            with self._not_watched():
                self.log.calls.append(inputs_call(len(self.log.calls), args, kwargs))
        if self.histograms.models.is_training and module.training:
            self.watch.reads.forward()
        with self._not_watched():
            self.scans.before_forward(self.paths.root_of(module), module, args, kwargs)

    @contextlib.contextmanager
    def _not_watched(self) -> Iterator[None]:
        """What ampscope itself computes is none of the script's ops."""
        before, self.watch.enabled = self.watch.enabled, False
        try:
            yield
        finally:
            self.watch.enabled = before

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self.paths.stack or torch.is_grad_enabled() or not self.attempts.count:
            return
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

    def _attempt_ended(self, count: int) -> None:
        record = self.attempts.records[-1]
        self.histograms.attempt_ended(count, record.scale if record.scaler else 1.0)
        self.watch.new_attempt(count)
        self.watch.reads.stepped()
        self._on_attempt(count)

    def _gaps(self, uses_half: bool) -> tuple[str, ...]:
        """What the script ran that a CPU computes otherwise than CUDA (policy.gaps)."""
        ops = set(self.watch.gap_ops)
        if uses_half and any(_has_rnn(model) for model in self.paths.models()):
            ops.add((gaps.RNN, "fp16"))
        return tuple(gap.id for gap in gaps.met_by(ops))

    def outcome(self, ended: str, **facts: object) -> Outcome:
        """The outcome so far, with what the script was seen to use."""
        records = self.attempts.records
        autocast = sorted({c.dtype for c in self.log.calls if c.name == "autocast" and c.dtype})
        half = sorted(
            {
                dtype_name(p.dtype)
                for m in self.paths.models()
                for p in m.parameters()
                if p.dtype in HALF
            }
        )
        flop_dtypes, flop_counts = self.precision.flops()
        errors = facts if "error_type" in facts else {**self.errors.caught(), **facts}
        return Outcome(
            ended=ended,
            attempts=self.attempts.count,
            elapsed_s=time.perf_counter() - self.started - self.histograms.elapsed_s,
            forwards=self.watch.reads.forwards,
            backwards=sum(c.name == "backward" for c in self.log.calls),
            models=tuple(type(m).__name__ for m in self.paths.models()),
            optimizers=tuple(type(o).__name__ for o in self.attempts.optimizers),
            scalers=tuple(f"scaler{i}" for i in range(len(self.log.scalers))),
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
            peak_bytes=peak_bytes(_device()),
            gaps=self._gaps(bool(autocast or half)),
            **errors,  # error_* and exit_code, checked by the dataclass
        )


def _has_rnn(model: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def _device() -> torch.device:
    """Where the script's memory is."""
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return torch.device("cuda" if uses_cuda else "cpu")
