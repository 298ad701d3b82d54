"""Records a script whose compiled code really runs compiled: losses, steps, skips, and its end.

A diagnosis runs what a script compiles as the eager code that it was made from, because a compiled
graph hides its ops. Compiled code may compute otherwise: a fused chain of pointwise ops keeps its
intermediate results in fp32. So before such a script is accused it runs once unchanged, and nothing
here looks inside a graph: no op, no module, no tensor between them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim.optimizer import Optimizer

from ampscope.capture.fused_kernels import noting
from ampscope.capture.global_hooks import REGISTERED
from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.optimizer_facts import lr_of
from ampscope.capture.taps import ACTIVATION, DRAW, RunningModules, TapPlace, below, tapping
from ampscope.capture.tensors import all_finite, floating_tensors, is_capturing, readable
from ampscope.capture.training_events import TrainingEvents, TrainingListener, scale_of
from ampscope.capture.user_objects import IdSet, parameters_of
from ampscope.numerics.formats import dtype_name
from ampscope.observations import (
    COMPILED_FRAMES,
    Call,
    Kernel,
    Observation,
    OptimizerStep,
    OpUse,
    Outcome,
    Tap,
)
from ampscope.patches import Patches
from ampscope.runner.device import has_cuda
from ampscope.runner.script_recorder import ScriptRecorder
from ampscope.source_lines import line_name
from ampscope.watcher.guard import Guard


def _load_inductor() -> None:
    """torch 2.11's inductor asks CUDA whether there is a GPU when it is imported, and CUDA is the
    script's to start."""
    answer = has_cuda()
    with Patches() as patches:
        patches.replace(torch.cuda, "is_available", lambda original: lambda: answer)
        importlib.import_module("torch._inductor.scheduler")


class CompiledRecorder(ScriptRecorder, TrainingListener):
    """As a ScriptRecorder, of what can be seen outside compiled code.

    One optimizer step is one record. A call of a compiled function that moves weights and shows
    no step, because it holds the step itself, is one too; its loss is the number that it returns.
    """

    has_taps = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """All hooks on; all off on exit."""
        self._loss: tuple[float | None, str] = None, ""
        self._backwards = 0
        self._scale: tuple[str, float] = "", 1.0
        self._bad_gradients = 0
        self._norm: float | None = None  # of this step's gradients, unscaled
        self._optimizers: IdSet[Optimizer] = IdSet()
        self._line = ""  # at which torch.compile was called first
        self._inside = False  # a call of compiled code runs
        self._stepping = False  # a step has begun and has not ended
        self._taps = TapLog(lambda: self.steps.count, self.paths)
        self._kernels: list[Kernel] = []
        guard = Guard(lambda line: None)
        with contextlib.ExitStack() as stack:
            failed = self._taps.failures.append
            _load_inductor()
            stack.enter_context(noting(self._kernels, failed))
            if self.has_taps and self.digests is None:
                stack.enter_context(tapping(self._taps.look, failed, everything=True))
            elif self.has_taps:
                stack.enter_context(tapping(self._digest_output, failed, everything=False))
            if self.has_taps or self.digests is not None:  # no hook: nothing is called in a forward
                stack.enter_context(REGISTERED.subscribe(self.paths.link))
            patches = stack.enter_context(Patches())
            stack.enter_context(TrainingEvents(self, lambda optimizer: True, None, guard))
            patches.wrap(Optimizer, "__init__", self._new_optimizer)
            patches.replace(torch, "compile", self._compile)
            if self.digests is not None:
                stack.enter_context(self.ledger.watching(self.digests))
            yield

    def _digest_output(self, place: TapPlace, tensor: Tensor) -> None:
        """A tensor passes in compiled code, of a run that is compared with another."""
        if place.role != ACTIVATION or self.digests is None:
            return
        begins = self._taps.begins(place)
        module = below(begins, place.module)
        if not isinstance(module, nn.Module) or module.training:  # no evaluation
            path = self._taps.path(begins, place.module)
            self.digests.tapped(path, place.op, place.line, tensor)

    def loss_seen(self, loss: Tensor) -> None:
        """A backward pass of this loss begins."""
        self._backwards += 1
        self._note_loss(loss)

    def gradients_complete(self, optimizer: Optimizer, scaler: Any) -> None:
        """A step of ``optimizer`` begins, through ``scaler`` or, where it is None, directly."""
        self._stepping = True
        self._scale = ("", 1.0) if scaler is None else ("scaler0", scale_of(scaler))
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        self._bad_gradients = sum(not all_finite(g) for g in gradients)
        if self.digests is not None:
            self.digests.gradients(optimizer)
        numbers = [n for g in gradients if (n := readable(g)) is not None]
        squares = sum(float(n.double().square().sum()) for n in numbers)
        self._norm = math.sqrt(squares) / self._scale[1]

    def optimizer_dropped(self, optimizer: Optimizer) -> None:
        """The script left this step out by itself."""
        self.optimizer_stepped(optimizer, skipped=True)

    def optimizer_stepped(self, optimizer: Optimizer, *, skipped: bool | Tensor) -> None:
        """A step was taken or skipped. Behind a scaler a compiled step looks like none at all; but
        finite gradients are never skipped."""
        self._stepping = False
        self._optimizers.add(optimizer)
        self._add(optimizer, skipped=self._bad_gradients > 0 and bool(skipped))

    def _note_loss(self, loss: Tensor) -> None:
        numbers = readable(loss.detach())
        if numbers is None or not numbers.numel():
            return
        value, dtype = float(numbers.float().sum()), dtype_name(loss.dtype)
        self._loss = value, dtype
        calls = self.log.calls
        calls.append(Call(len(calls), self.steps.count, "backward", value=value, dtype=dtype))

    def _add(self, optimizer: Optimizer | None, *, skipped: bool) -> None:
        owners = list(self._optimizers) if optimizer is None else [optimizer]
        bad = sum(not all_finite(p.detach()) for o in owners for p in parameters_of(o))
        (loss, dtype), (scaler, scale) = self._loss, self._scale
        self.steps.records.append(
            OptimizerStep(
                step=self.steps.count,
                optimizer=self.steps.optimizer_name(optimizer) if optimizer else "optimizer0",
                scaler=scaler,
                loss=loss,
                loss_dtype=dtype,
                scale=scale,
                skipped=skipped,
                unscaled_before=False,
                backwards=self._backwards,
                grad_total=0,
                grad_zero=0,
                grad_nonfinite=self._bad_gradients,
                grad_max=None,
                grad_norm=self._norm,
                lr=lr_of(owners[0]) if owners else 0.0,
                moved_share=None,
                update_norm=None,
                weight_nonfinite=bad,
                grad_dtypes="",
                weight_dtypes="",
                state_dtypes="",
            )
        )
        self._backwards, self._norm = 0, None
        self.steps.count += 1
        self._digested(self.steps.count, scale, owners[0] if owners else None)
        self._on_optimizer_step(self.steps.count)

    def _new_optimizer(
        self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.add(optimizer)

    def _compile(self, original: Any) -> Any:
        """``torch.compile``: what it gives for a function is looked at from outside. A compiled
        module is no whole step, and is left unchanged."""

        def compile_one(model: Any = None, **options: Any) -> Any:
            self._line = self._line or line_name(self.lines.where())
            if model is None:  # torch.compile(fullgraph=True), as a decorator
                return lambda function: compile_one(function, **options)
            made = original(model, **options)
            is_function = not isinstance(model, (torch.nn.Module, type))
            return self._called(made) if is_function else made

        return compile_one

    def _called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or torch.compiler.is_compiling() or is_capturing():
                return function(*args, **kwargs)
            before, count = self._weights(), self.steps.count
            self._inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside = False
            seen = self.steps.count != count or self._stepping
            if before and not seen and self._weights() != before:
                numbers = [t for t in floating_tensors(result) if t.numel() == 1]
                if numbers and not self._backwards:
                    self._note_loss(numbers[0])
                self._bad_gradients = 0
                self._add(None, skipped=False)
            return result

        return call

    def _weights(self) -> list[str]:
        """Sums that differ between weights before and after a step; as text NaN equals itself."""
        with torch.no_grad():
            return [
                str(float(numbers.double().sum()))
                for optimizer in self._optimizers
                for p in parameters_of(optimizer)
                if (numbers := readable(p.detach())) is not None
            ]

    def _closed(self, outcome: Outcome) -> list[Observation]:
        # Dynamo counts no frame of what was compiled with fullgraph=True, but its graphs.
        compiled = max(int(counters["frames"]["ok"]), int(counters["stats"]["unique_graphs"]))
        use = OpUse(COMPILED_FRAMES, "", "", self._line, 0, count=compiled)
        return [use, *self._taps.records, *self._kernels, *super()._closed(outcome)]


TAPPED_STEPS = 3  # whose numbers are kept; a fault of changing shapes shows at the second
DRAWN_STEPS = 6  # whose random numbers are: five of the same sum in a row are no chance
MOST_TAPS = 5_000  # numbers of one run


class TapLog:
    """What taps tell, as observations."""

    def __init__(self, step: Callable[[], int], names: ModulePaths) -> None:
        self.records: list[Tap] = []
        self._names = names
        self.begins = RunningModules().begins
        self.failures: list[str] = []  # why a graph got no taps
        self._step = step
        self._order = itertools.count()
        self._bad: int | None = None  # the first step with a number that is not finite

    def look(self, place: TapPlace, tensor: Tensor) -> None:
        """A tensor passes."""
        step, order = self._step(), next(self._order)
        kept = step < (DRAWN_STEPS if place.role == DRAW else TAPPED_STEPS)
        if not kept and self._bad is not None and self._bad != step:
            return
        with torch.no_grad(), own_ops():
            numbers = readable(tensor)
            if numbers is None or not numbers.numel():
                return
            size = numbers.double().abs()
            finite = size[torch.isfinite(size)]
            largest = float(finite.max()) if finite.numel() else 0.0
            others, total = size.numel() - finite.numel(), float(finite.sum())
        if others and self._bad is None:
            self._bad = step
        if (kept or others) and len(self.records) < MOST_TAPS:
            begins = self.begins(place)
            module, maker = self.path(begins, place.module), self.path(begins, place.maker)
            self.records.append(
                Tap(
                    step, order, module, place.role, maker, place.op, place.line, place.dtype,
                    largest, total, others,
                )
            )  # fmt: skip

    def path(self, begins: object, path: str) -> str:
        """A path below what was compiled as one below the outermost model."""
        parts = path.split(".") if path else []
        while begins is not None and not isinstance(begins, nn.Module) and parts:
            begins, parts = below(begins, parts[0]), parts[1:]  # an object that holds the model
        if not isinstance(begins, nn.Module):
            return path
        return ".".join(filter(None, (self._names.path(begins), *parts)))
