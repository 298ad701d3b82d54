"""Instrument: what a run's tensors hold, in a few numbers each, so that two runs can be compared.

A digest stands for every element of a tensor, none is sampled::

    checksum   64 bits over the raw bits: equal checksums mean the same numbers in the same places
    sketch     16 sums with pseudo-random signs (a count sketch). It is linear, so the distance of
               two tensors follows from their sketches alone, whatever their dtypes
    norm, peak, non-finite elements

Digested are, in the order of a step: the weights and buffers at a model's first call, what the
outermost module gets, the output of each module, the gradients of an optimizer when its step
begins, and its parameters and state afterwards; in one chosen step also the result of each op.

Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002: the expected squared
norm of the difference of two sketches is that of the difference of the tensors.
"""

from __future__ import annotations

import base64
import functools
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampscope.capture.failures import Failures, OwnTime
from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.module_paths import ModulePaths, unwrapped
from ampscope.capture.script.op_facts import tensors
from ampscope.capture.script.optimizer_steps import StepInstruments
from ampscope.capture.tensors import floating_tensors, is_dtensor, readable
from ampscope.capture.user_objects import (
    IdSet,
    buffers,
    own_parameters,
    parameters,
    parameters_of,
    state_of,
)
from ampscope.numerics.formats import dtype_name
from ampscope.observations import DIGEST_ROLES, LINE_ROLE, Digests
from ampscope.source_lines import line_name

BUCKETS = 16  # the distance is right to sqrt(2 / 16), a third
BLOCK = 1 << 18  # elements at a time: 2 MiB of signs, 2 MiB of bits
MOST_TENSORS = 60_000  # 15 MB of records
MOST_OPS = 6_000
MOST_OUTPUTS = 4  # of one module
MOST_OF_LINES, MOST_OF_A_LINE = 2_000, 4  # results: in all, and of one op of one line
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Ops that hand numbers on as they are, or memory that holds none yet.
_NO_RESULT = frozenset({
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias",
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze",
    "squeeze", "lift_fresh", "view_as_real",
})  # fmt: skip
_CASTS = frozenset({"_to_copy", "copy_"})
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, as in splitmix64


@dataclass(frozen=True, slots=True)
class Digest:
    """One tensor; ``sketch`` has :data:`BUCKETS` sums of its finite elements."""

    dtype: str
    total: int
    checksum: int
    norm: float
    peak: float
    nonfinite: int
    sketch: tuple[float, ...]


def digest(tensor: Tensor) -> Digest | None:
    """The digest of a tensor of any real dtype; None where its numbers cannot be read."""
    if tensor.dtype.is_complex or tensor.is_quantized:
        return None
    values = readable(tensor)
    if values is None:
        return None
    flat = values.detach().contiguous().reshape(-1)
    checksum, squares, peak, nonfinite = 0, 0.0, 0.0, 0
    sketch = [0.0] * BUCKETS
    for number, start in enumerate(range(0, flat.numel(), BLOCK)):
        part = flat[start : start + BLOCK]
        signs, odd = _hashes(part.device)
        bits = part if part.dtype == torch.bool else part.view(_BITS[part.itemsize])
        summed = (bits.to(torch.int64) * odd[: part.numel()]).sum()
        numbers = part.double()
        finite = torch.isfinite(numbers)
        bad = part.numel() - finite.sum()
        numbers = torch.where(finite, numbers, 0.0)
        # Squares of the largest doubles overflow; no training has them.
        read = torch.stack([numbers.square().sum(), numbers.abs().max(), bad.double()])
        signed = numbers * signs[: part.numel()]
        if part.numel() % BUCKETS:
            signed = torch.nn.functional.pad(signed, (0, -part.numel() % BUCKETS))
        sums = signed.reshape(-1, BUCKETS).sum(0)
        square, largest, lost, *here = torch.cat([read, sums]).tolist()
        checksum = (checksum * _ODD + int(summed)) & _MASK
        squares, peak, nonfinite = squares + square, max(peak, largest), nonfinite + int(lost)
        sign = -1.0 if (number * _ODD) & (1 << 63) else 1.0
        sketch = [a + sign * b for a, b in zip(sketch, here, strict=True)]
    return Digest(
        dtype_name(tensor.dtype),
        flat.numel(),
        checksum,
        squares**0.5,
        peak,
        nonfinite,
        tuple(sketch),
    )


@functools.cache
def _hashes(device: torch.device) -> tuple[Tensor, Tensor]:
    """Pseudo-random signs and odd numbers for the places of a block, the same on every machine and
    with every version of torch: whole numbers that wrap around."""
    mixed = torch.arange(1, BLOCK + 1, device=device) * _signed(_ODD)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # splitmix64's
        # The mask undoes what an arithmetic shift copies of the sign.
        mixed = (mixed ^ ((mixed >> 30) & ((1 << 34) - 1))) * _signed(factor)
    return ((mixed >> 63) | 1).to(torch.int8), mixed | 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


class RunDigests(StepInstruments):
    """Digests of one run, in :meth:`records`; stands between the steps' instruments and ``inner``.

    ``op_step`` is the step of which each op is digested. ``origin`` names module and line of the op
    that runs.
    """

    def __init__(
        self,
        paths: ModulePaths,
        inner: StepInstruments,
        origin: Callable[[], tuple[str, str]],
        op_step: int = 0,
    ) -> None:
        self.names = ParameterNames(paths, self.prefix)
        self.failures = Failures()
        self._time = OwnTime(self.failures)
        self._paths = paths
        self._inner = inner
        self._origin = origin
        self._op_step = op_step
        self._step = 0
        self._known: IdSet[nn.Module] = IdSet()
        self._roots: list[weakref.ref[nn.Module]] = []
        self._open: dict[str, _Row] = {}  # by role, of the step that runs
        self._pending: set[int] = set()  # ids of optimizers whose gradients were digested
        self._records: list[Digests] = []
        self._count = self._ops = 0
        self._is_off = False

    @property
    def elapsed_s(self) -> float:
        """Time spent here so far."""
        return self._time.elapsed_s

    @property
    def wants_updates(self) -> bool:
        return self._inner.wants_updates

    def after_step(self, before: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._inner.after_step(before)

    def spent(self, what: str) -> AbstractContextManager[None]:
        return self._inner.spent(what)

    def switch_off(self) -> None:
        """Digest nothing more: the script has ended, or this is a fork of its process."""
        self._is_off = True

    def gradients_complete(self, optimizer: Optimizer) -> None:
        """The script is about to unscale, step or skip; the first of these calls counts."""
        self._inner.gradients_complete(optimizer)
        self.gradients(optimizer)

    def gradients(self, optimizer: Optimizer) -> None:
        """The gradients of a step, once; its weights as the run found them, where no model's first
        call showed them."""
        if id(optimizer) in self._pending:
            return
        if not self._roots and not self._step:
            owned = parameters_of(optimizer)
            self._add_all("start", ((self.names.of(p, optimizer), p) for p in owned))
        self._pending.add(id(optimizer))
        found = [p for p in parameters_of(optimizer) if p.grad is not None]
        # Backward reaches the last layers first.
        self._add_all("gradient", ((self.names.of(p, optimizer), p.grad) for p in reversed(found)))

    def before_forward(self, root: nn.Module, module: nn.Module, args: Any, kwargs: Any) -> None:
        """An outermost module is about to run."""
        root = unwrapped(root)
        if root not in self._known:
            self._known.add(root)
            self._roots.append(weakref.ref(root))
            prefix = self.prefix(root)
            self._add_all("start", _named_tensors(root, prefix))
        path = self.path(module)
        place = f"{path}: " if path else ""
        given = tensors(args, kwargs)
        named = ((f"{place}input {n}", t) for n, t in enumerate(given) if t.grad_fn is None)
        self._add_all("input", named)

    def after_forward(self, module: nn.Module, output: object) -> None:
        """A module has run, inside others or not."""
        if not torch.is_grad_enabled() or torch._C._current_autograd_node() is not None:
            return  # an evaluation, or activation checkpointing in backward
        path = self.path(module)
        found = floating_tensors(output)[:MOST_OUTPUTS]
        self._add_all("activation", ((path, tensor) for tensor in found))

    def tapped(self, module: str, op: str, line: str, output: Tensor) -> None:
        """A module inside compiled code has made this output, by this op."""
        if torch._C._current_autograd_node() is not None:  # activation checkpointing in backward
            return
        row = self._row("activation")
        before = len(row.names)
        self._add_all("activation", iter([(module, output)]))
        row.ops += [op] * (len(row.names) - before)
        row.lines += [line] * (len(row.names) - before)

    def after_op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An op below autocast has run, outside the optimizers' own steps."""
        if self._step != self._op_step or self._ops >= MOST_OPS or self._is_off:
            return
        made = [t for t in tensors(out, None) if t.is_floating_point()][:1]
        if str(func._opname) in _NO_RESULT or not made:
            return
        if not torch.is_grad_enabled() and torch._C._current_autograd_node() is None:
            return
        with self._looking("the digests of ops"):
            if (found := digest(made[0])) is None:
                return
            self._ops += 1
            backward = torch._C._current_autograd_node() is not None
            takes = "+".join(
                dict.fromkeys(
                    dtype_name(t.dtype) for t in tensors(args, kwargs) if t.is_floating_point()
                )
            )
            module, line = self._origin()
            row = self._row("backward_op" if backward else "op")
            row.add(module, found)
            row.ops.append(f"{func._opname}({takes})")
            row.lines.append(line)

    def optimizer_stepped(self, count: int, scale: float, optimizer: Optimizer | None) -> None:
        """A step was taken or skipped, the ``count``-th; its gradients carried ``scale``."""
        if optimizer is not None:
            owned = parameters_of(optimizer)
            self._add_all("weight", ((self.names.of(p, optimizer), p) for p in owned))
            self._add_all("state", _state(optimizer, self.names))
        for ref in self._roots:
            if (root := ref()) is not None:
                self._add_all("buffer", _buffers(root, self.prefix(root)))
        self._close(scale)
        self._pending.clear()
        self._step = count

    def records(self) -> list[Digests]:
        """Everything so far, that of the step that runs included."""
        return [*self._records, *(row.record(self._step, 1.0) for row in self._ordered())]

    def prefix(self, root: nn.Module) -> str:
        """What stands before the names of a model: nothing of the first, its class of another."""
        numbers = [ref() for ref in self._roots]
        root = unwrapped(root)
        place = next((n for n, one in enumerate(numbers) if one is root), 0)
        return type(root).__name__ if place else ""

    def path(self, module: nn.Module) -> str:
        """The dotted path of a module, below its model's prefix."""
        root = self._paths.root_of(module)
        return ".".join(filter(None, (self.prefix(root), self._paths.path(module))))

    def _add_all(self, role: str, named: Iterator[tuple[str, Tensor | None]]) -> None:
        if self._is_off or self._count >= MOST_TENSORS:
            return
        with self._looking("the digests of tensors"):
            row = self._row(role)
            for name, tensor in named:
                if tensor is None or self._count >= MOST_TENSORS:
                    continue
                if (found := digest(tensor)) is not None:
                    row.add(name, found)
                    self._count += 1

    def _looking(self, what: str) -> AbstractContextManager[Any]:
        return _Looking(self._time.spent(what))

    def _row(self, role: str) -> _Row:
        return self._open.setdefault(role, _Row(role))

    def _ordered(self) -> list[_Row]:
        order = {role: n for n, role in enumerate(DIGEST_ROLES)}
        return sorted((r for r in self._open.values() if r.names), key=lambda r: order[r.role])

    def _close(self, scale: float) -> None:
        for row in self._ordered():
            self._records.append(row.record(self._step, scale))
        self._open = {}


class _Looking(AbstractContextManager[None]):
    """Around what ampscope computes: no op of the script's, nothing that autograd sees."""

    def __init__(self, spent: AbstractContextManager[None]) -> None:
        self._parts = (spent, own_ops(), torch.no_grad())

    def __enter__(self) -> None:
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        for part in reversed(self._parts[1:]):
            part.__exit__(*error)
        return self._parts[0].__exit__(*error)


class LineDigests:
    """Digests of what the script's lines computed before the training, and forward in the first
    step that is looked at in full: where a run and its control part.

    ``place`` says where the op that has just run belongs, ("", 0) for nowhere.
    """

    def __init__(self, place: Callable[[], tuple[str, int]]) -> None:
        self.failures = Failures()
        self._time = OwnTime(self.failures)
        self._place = place
        self._row = _Row(LINE_ROLE)
        self._seen: Counter[tuple[tuple[str, int], str]] = Counter()

    def after_op(self, func: Any, out: Any) -> None:
        """An op below autocast has run. Casts are left out, of which a control makes others."""
        op = str(func._opname)
        if len(self._row.names) >= MOST_OF_LINES or op in _NO_RESULT or op in _CASTS:
            return
        if torch._C._current_autograd_node() is not None:
            return
        made = [t for t in tensors(out, None) if t.is_floating_point()][:1]
        place = self._place()
        if not made or not place[0] or self._seen[place, op] >= MOST_OF_A_LINE:
            return
        with _Looking(self._time.spent("the digests of lines")):
            if (found := digest(made[0])) is not None:
                self._seen[place, op] += 1
                self._row.add(op, found)
                self._row.lines.append(line_name(place))

    def records(self) -> list[Digests]:
        """One record, of all that was seen."""
        return [self._row.record(0, 1.0)] if self._row.names else []


class _Row:
    """Digests of one role that are collected."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.names: list[str] = []
        self.ops: list[str] = []
        self.lines: list[str] = []
        self._found: list[Digest] = []

    def add(self, name: str, found: Digest) -> None:
        """One more."""
        self.names.append(name)
        self._found.append(found)

    def record(self, step: int, scale: float) -> Digests:
        """As an observation. Gradients are divided by ``scale``, checksums are not."""
        scale = scale if self.role in ("gradient", "backward_op") else 1.0
        found = self._found
        return Digests(
            step=step,
            role=self.role,
            scale=scale,
            names=tuple(self.names),
            dtypes=tuple(d.dtype for d in found),
            totals=tuple(d.total for d in found),
            checksums=tuple(f"{d.checksum:016x}" for d in found),
            norms=tuple(d.norm / scale for d in found),
            peaks=tuple(d.peak / scale for d in found),
            nonfinite=tuple(d.nonfinite for d in found),
            sketches=tuple(_packed(d.sketch, scale) for d in found),
            ops=tuple(self.ops),
            lines=tuple(self.lines),
        )


def _packed(sketch: Sequence[float], scale: float) -> str:
    """Little-endian doubles in base64."""
    parts = struct.pack(f"<{len(sketch)}d", *(x / scale for x in sketch))
    return base64.b64encode(parts).decode("ascii")


class ParameterNames:
    """Dotted names of parameters, from the moment at which modules register them: known also where
    no module is seen to run, as in compiled code."""

    def __init__(self, paths: ModulePaths, prefix: Callable[[nn.Module], str]) -> None:
        self._paths = paths
        self._prefix = prefix
        self._owners: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def register(self, module: nn.Module, name: str, parameter: object) -> None:
        """A module has got this parameter; for torch's hook on registrations."""
        if isinstance(parameter, Tensor):
            self._owners.setdefault(id(parameter), (weakref.ref(module), name))

    def of(self, parameter: Tensor, optimizer: Optimizer) -> str:
        """``encoder.0.weight``; of one whose module is not known its place in the optimizer."""
        module, name = None, ""
        if id(parameter) in self._owners:
            ref, name = self._owners[id(parameter)]
            module = ref()
            own = None if module is None else dict(own_parameters(module)).get(name)
            module = module if own is parameter else None  # else an id was used again
        if module is None:
            every = enumerate(parameters_of(optimizer))
            place = next((str(n) for n, p in every if p is parameter), "?")
            return f"parameter {place} of {type(optimizer).__name__}"
        prefix = self._prefix(self._paths.root_of(module))
        return ".".join(filter(None, (prefix, self._paths.path(module), name)))


def _named_tensors(root: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parameters(root):
        yield ".".join(filter(None, (prefix, name))), parameter
    yield from _buffers(root, prefix)


def _buffers(root: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in buffers(root):
        yield ".".join(filter(None, (prefix, name))), buffer


def _state(optimizer: Optimizer, names: ParameterNames) -> Iterator[tuple[str, Tensor]]:
    for parameter, state in state_of(optimizer):
        for key, value in state.items():
            if isinstance(value, Tensor) and not is_dtensor(value):
                yield f"{names.of(parameter, optimizer)}: {key}", value
