"""Exponent histograms and ops of an untouched script, one frame per optimizer step, skipped or not.

Activations and output gradients are counted by the hooks that a probe uses. The optimizer's own
parameters, their gradients and their updates are counted when the script calls ``unscale_`` or the
step, so gradients are seen as backward left them, still scaled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ampscope.capture import weights
from ampscope.capture.accumulator import Accumulator
from ampscope.capture.failures import Failures, OwnTime
from ampscope.capture.histograms import HistogramHooks
from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.user_objects import IdMap, modules, own_parameters, parameters, parameters_of
from ampscope.records import Cadence, Frame, ModuleRecord, NonFiniteRecord, OpRecord, Role


class ScriptHistograms:
    """Counts while entered; :meth:`take` gives what came since the last call."""

    def __init__(self, paths: ModulePaths, cadence: Cadence) -> None:
        self.models = ScriptModels(paths)
        self.failures = Failures()
        self.trace = OpTrace(self.models, failures=self.failures)
        self._cadence = cadence
        self._counts = Accumulator(self.failures)
        self._hooks = HistogramHooks(self.models, self._counts, self.failures)
        self._step = 0
        self._time = OwnTime(self.failures)
        self._counted: set[int] = set()  # ids of optimizers whose gradients were counted
        self._frames: list[Frame] = []
        self._nonfinite: list[NonFiniteRecord] = []
        self._op_sets: dict[int, int] = {}
        self._ops: list[tuple[int, list[OpRecord]]] = []

    def __enter__(self) -> ScriptHistograms:
        self._hooks.__enter__()
        self.trace.place.__enter__()
        self._begin(self._step)
        return self

    def begin_at(self, step: int) -> None:
        """The first step that is recorded has this number; before entering."""
        self._step = step

    def __exit__(self, *error: object) -> None:
        self._end()
        self.trace.place.__exit__(*error)
        self._hooks.__exit__(*error)
        self.models.close()

    @property
    def note(self) -> str:
        """Why counting was slow, or nothing."""
        return self._counts.note

    @property
    def traces(self) -> bool:
        """Whether the ops of this step are wanted."""
        return _is_due(self._step, self._cadence.trace)

    @property
    def elapsed_s(self) -> float:
        """Time spent here so far, which is none of the script's."""
        return self._time.elapsed_s + self._hooks.elapsed_s + self.trace.elapsed_s

    def switch_off(self) -> None:
        """Count nothing more: this is a fork of the script's process."""
        self._cadence = Cadence(0, 0, 0)
        self._hooks.active = False

    def record_op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The script has run one op."""
        if self.traces:
            started = time.perf_counter()
            self.trace.record(func, args, kwargs, out)
            self._time.elapsed_s += time.perf_counter() - started

    def gradients_complete(self, optimizer: Optimizer) -> None:
        """The script is about to unscale, step or skip; the first of these calls counts."""
        self.trace.place.outside = "step"
        if id(optimizer) in self._counted or not _is_due(self._step, self._cadence.histogram):
            return
        self._counted.add(id(optimizer))
        with self.spent():
            found = ((self.models.position(p), p) for p in parameters_of(optimizer))
            own = [(i, p) for i, p in found if i is not None and p.is_floating_point()]
            owned = ((self.models.owners[i], p) for i, p in own)
            weights.count_weights(self._counts, owned)
            weights.count_gradients(self._counts, own)

    @property
    def wants_updates(self) -> bool:
        """Whether :meth:`after_step` needs the weights before the step."""
        return _is_due(self._step, self._cadence.histogram)

    def after_step(self, before: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The optimizer's own step has run: parameters, and copies of them as they were."""
        if self.wants_updates:
            with self.spent():
                owners = ((self.models.owner(p), p, copy) for p, copy in before)
                owned = ((owner, p, copy) for owner, p, copy in owners if owner is not None)
                weights.count_updates(self._counts, owned)

    def optimizer_stepped(self, count: int, scale: float) -> None:
        """A step is over, ``count`` in all; its gradients carried ``scale``."""
        with self.spent():
            self._end(scale)
        self._begin(count)

    def take(self) -> ScriptMeasurements:
        """What came since the last call."""
        measured = ScriptMeasurements(
            self.models.take_records(), self._frames, self._nonfinite, self._ops, self._op_sets
        )
        self._frames, self._nonfinite, self._ops, self._op_sets = [], [], [], {}
        return measured

    def _begin(self, step: int) -> None:
        self._step = step
        self.trace.place.outside = "forward"
        due = _is_due(step, self._cadence.histogram)
        self._hooks.start_step(step, active=due)

    def _end(self, scale: float = 1.0) -> None:
        self._hooks.end_step()
        self._counted.clear()
        frames = self._counts.take(self._step, scale)
        reached = self.models.take_arrivals()
        if (gradients := frames.pop(Role.WEIGHT_GRAD, None)) is not None:
            # A parameter that was frozen when its model first ran has no place in backward's order.
            order = dict.fromkeys((*reached, *gradients.modules))
            models = self.models
            self._nonfinite += weights.nonfinite(gradients, order, models.names.__getitem__)
            frames[Role.WEIGHT_GRAD] = weights.by_module(gradients, models.owners.__getitem__)
        self._frames += frames.values()
        if self.traces:
            number, ops = self.trace.take()
            self.trace.forget()
            self._op_sets[self._step] = number
            if ops:
                self._ops.append((number, ops))

    def spent(self, what: str = "the histograms of a step") -> AbstractContextManager[None]:
        """Around what is none of the script's own; ``what`` says what is missing if it fails."""
        return self._time.spent(what)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass(frozen=True, slots=True)
class ScriptMeasurements:
    """What was measured at steps that are over; ``op_sets`` maps a step to its ops' id."""

    modules: list[ModuleRecord]
    frames: list[Frame]
    nonfinite: list[NonFiniteRecord]
    ops: list[tuple[int, list[OpRecord]]]
    op_sets: dict[int, int]


class ScriptModels:
    """As :class:`ModelMap`, for models that come one by one: numbers for the modules of every model
    that a script runs, whenever it makes them.

    A model is numbered when one of its modules first runs. The first model's paths are plain
    (``encoder.0``); those of a later one begin with its class (``Discriminator.net.0``), so that
    two models of a script do not share names. A model that only ever runs without gradients (a
    teacher, a copy for evaluation) is left out, as is what the others do without them. Nothing here
    keeps a model alive that the script drops.
    """

    def __init__(self, paths: ModulePaths) -> None:
        self.is_training = True  # the outermost module that runs was called with gradients
        self._paths = paths
        self._numbers: IdMap[nn.Module, int] = IdMap()
        self._positions = WeakTensorKeyDictionary()  # parameter -> place in the two lists below
        self.owners: list[int] = []  # the number of the module, by the parameter's position
        self.names: list[str] = []  # dotted, by position
        self._arrivals: list[int] = []  # positions, as backward reached them
        self._handles: list[RemovableHandle] = []
        self._records: list[ModuleRecord] = []
        self._taken = 0

    def index(self, module: nn.Module) -> int | None:
        """The module's number. A model that is new is numbered first. None outside training, and
        inside jit.trace, where even a size is a tensor."""
        if not self.is_training or torch._C._get_tracing_state() is not None:
            return None
        number = self._numbers.get(module)
        if number is None:
            with own_ops():
                self._add(self._paths.root_of(module))
            number = self._numbers.get(module)
        return number

    def owner(self, parameter: Tensor) -> int | None:
        """The number of the module that owns ``parameter``; None when no module that ran does."""
        position = self.position(parameter)
        return None if position is None else self.owners[position]

    def position(self, parameter: Tensor) -> int | None:
        """The parameter's place among all; None when no module that ran owns it."""
        position: int | None = self._positions.get(parameter)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return position

    def take_arrivals(self) -> list[int]:
        """Positions in the order in which backward reached them since the last call."""
        reached = list(dict.fromkeys(self._arrivals))
        self._arrivals.clear()
        return reached

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def take_records(self) -> list[ModuleRecord]:
        """The modules that were numbered since the last call."""
        new = self._records[self._taken :]
        self._taken = len(self._records)
        return new

    def _add(self, root: nn.Module) -> None:
        """Number what is new below ``root``: a model may get further modules later on. One with
        lazy modules waits until its first forward has given them shapes."""
        if any(is_lazy(parameter) for _, parameter in parameters(root)):
            return
        names = ModelMap(root)
        known = {record.path for record in self._records}
        prefix = "" if "" not in known else type(root).__name__
        for (_, module), record in zip(modules(root), names.records(), strict=True):
            if module in self._numbers:
                continue
            number = len(self._records)
            self._numbers[module] = number
            path = _unused(".".join(filter(None, (prefix, record.path))), known)
            known.add(path)
            self._records.append(dataclasses.replace(record, index=number, path=path))
            for name, parameter in own_parameters(module):
                self._add_parameter(parameter, number, f"{path}.{name}" if path else name)

    def _add_parameter(self, parameter: nn.Parameter, owner: int, name: str) -> None:
        if parameter in self._positions:
            return  # shared with a module that came before
        position = self._positions[parameter] = len(self.owners)
        self.owners.append(owner)
        self.names.append(name)
        if parameter.requires_grad:
            arrived = partial(_note, self._arrivals, position)
            self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]  # as above


def _note(arrivals: list[int], position: int, parameter: Tensor) -> None:
    arrivals.append(position)


def _unused(path: str, known: set[str]) -> str:
    """``path``, with a number behind it where another model's module has it."""
    if path not in known:
        return path
    return next(p for n in range(2, len(known) + 3) if (p := f"{path} ({n})") not in known)
