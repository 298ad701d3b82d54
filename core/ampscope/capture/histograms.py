"""Instrument: exponent histograms of what modules put out and of the gradients that come back.

One global forward hook sees every module's output; a tensor hook on that output sees its gradient,
in the dtype in which it really flows and still multiplied by the loss scale. Modules that hand on a
child's very output (``Sequential``) are not counted twice; a module that changes its input in place
(``nn.ReLU(inplace=True)``) hands on the same tensor with other values, and is counted.

:class:`Accumulator` collects the counts of one step, all roles together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ampscope.capture.exponent_count import (
    DeviceCounter,
    PendingCounts,
    count_into,
    count_small_into,
    prepare,
)
from ampscope.capture.failures import Failures
from ampscope.capture.global_hooks import FORWARD, Subscription
from ampscope.capture.model_map import ModuleNumbers
from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import (
    Unreadable,
    floating_tensors,
    in_backward,
    is_capturing,
    unreadable,
    version,
)
from ampscope.numerics.formats import dtype_name
from ampscope.numerics.histogram import RAW_LEN, Raw
from ampscope.records import Frame, Role

_SEEN = "_ampscope_seen"  # attribute on an output tensor: the step and version that were counted
_INSTANCES = itertools.count()  # two that watch at once must not read each other's marks


def _unguarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


class HistogramHooks:
    """Counts activations and grad_outputs while :attr:`active`; asleep it hears of no module."""

    def __init__(
        self,
        names: ModuleNumbers,
        counts: Accumulator,
        failures: Failures | None = None,
        guarded: Callable[[Callable[..., Any]], Callable[..., Any]] = _unguarded,
    ) -> None:
        """``guarded`` wraps each function that torch is given. What fails while counting is noted
        in ``failures``; without these it is raised, for ``guarded`` to deal with."""
        self._guarded = guarded
        self.names = names
        self.counts = counts
        self._failures = failures
        self._active = False
        self.elapsed_s = 0.0  # time spent counting, since the loop last reset it
        self._seen = f"{_SEEN}_{next(_INSTANCES)}"
        self._step = -1
        self._handle: Subscription | None = None
        self._on_leaves: list[tuple[Tensor, RemovableHandle]] = []

    def __enter__(self) -> HistogramHooks:
        hear = self._guarded(self._after_forward)
        self._handle = FORWARD.subscribe(hear, awake=self._active)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.remove()
        self.end_step()

    @property
    def active(self) -> bool:
        """Whether modules are counted now."""
        return self._active

    @active.setter
    def active(self, active: bool) -> None:
        self._active = active
        if self._handle is not None:
            self._handle.wake(active)

    def start_step(self, step: int, *, active: bool) -> None:
        """Count this step, or sleep through it."""
        self._step, self.active = step, active

    def end_step(self) -> None:
        """Stop counting. Hooks on the graph die with the graph; those on leaves (a module that puts
        out its own parameter) would stay, and are taken off."""
        self.active = False
        for leaf, handle in self._on_leaves:
            handle.remove()
            leaf.__dict__.pop(self._seen, None)
        self._on_leaves.clear()

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        if not self.active or is_capturing():
            return
        index = self.names.index(module)
        if index is None:
            return
        started = time.perf_counter()
        try:
            with own_ops():
                self._look(index, output)
        except Exception as error:  # no look at a tensor may end the step
            if self._failures is None:
                raise
            self._failures.add("the outputs of some modules", error)
        self.elapsed_s += time.perf_counter() - started

    def _look(self, index: int, output: object) -> None:
        # Activation checkpointing repeats a forward pass inside the backward pass. Its activations
        # were counted the first time; its gradients may be the only ones that flow.
        is_repeated = in_backward()
        for tensor in floating_tensors(output):
            seen = (self._step, version(tensor))
            if tensor.__dict__.get(self._seen) == seen:
                continue
            tensor.__dict__[self._seen] = seen
            if not is_repeated:
                self.counts.add(Role.ACTIVATION, index, tensor)
            if tensor.requires_grad:
                hook = self._guarded(partial(self._count_gradient, index))
                handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it untyped
                if tensor.is_leaf:
                    self._on_leaves.append((tensor, handle))

    def _count_gradient(self, index: int, gradient: Tensor | None) -> None:
        if gradient is None or not self.active or is_capturing():  # a Function may give none
            return
        started = time.perf_counter()
        try:
            with own_ops():
                self.counts.add(Role.GRAD_OUTPUT, index, gradient)
        except Exception as error:
            if self._failures is None:
                raise
            self._failures.add("the gradients at some outputs", error)
        self.elapsed_s += time.perf_counter() - started


# Exponent counts of one step, all roles together: on a CPU at once, on CUDA with one transfer.
#
# A row belongs to one (role, owner, dtype), the owner being a module's number or a parameter's
# position; a module that is called several times in a step adds to its row.
#
#     counts = Accumulator()
#     counts.add(Role.ACTIVATION, 3, tensor)      # once for each tensor
#     frames = counts.take(step=7, scale=65536.0) # {Role.ACTIVATION: Frame(...)}, and starts anew
#
# On CUDA `take` waits until the counts have arrived. A training that must not wait calls `collect`,
# and asks what that returned for its frames a step later.
#
# Counting runs below every dispatch mode: the op trace must not see the instruments' own ops, and
# a trip through a mode costs 3 us, half as much as counting a small tensor.


_Key = tuple[Role, int, torch.dtype]
_FIRST_ROWS = 256
_ROW_BYTES = 8 * RAW_LEN


class Accumulator:
    """Collects the histograms of a step; :meth:`take` returns them. A tensor that cannot be read is
    left out; one on which counting fails is left out and noted in ``failures``, without which it
    raises."""

    def __init__(self, failures: Failures | None = None) -> None:
        self._failures = failures
        self._rows: dict[_Key, int] = {}  # kept from step to step: the same tensors come again
        self._keys: list[_Key] = []
        self._touched: set[int] = set()
        self._is_clean = True  # nothing was counted since the last take, in part or in whole
        self._counts: Raw = np.zeros((_FIRST_ROWS, RAW_LEN), np.int64)
        self._memory = self._counts, self._counts.ctypes.data
        self._devices: dict[torch.device, DeviceCounter] = {}
        self._uses_cpu = False  # whether a large or strided tensor of the CPU was counted

    def add(self, role: Role, owner: int, tensor: Tensor, *, stable: bool = False) -> None:
        """Count every element of ``tensor``. ``stable``: no code writes to it before the next
        :meth:`flush` or :meth:`take`, so that on CUDA one launch may serve many tensors."""
        row = self._row((role, owner, tensor.dtype))
        self._is_clean = False
        try:
            self._count(tensor, row, stable)
            self._touched.add(row)
        except Unreadable:
            return  # it holds nothing that could be counted
        except Exception as error:
            if self._failures is None:
                raise
            self._failures.add(f"the histograms of some tensors ({role.value})", error)

    @property
    def note(self) -> str:
        """Why counting was slow on the devices of the tensors so far, or nothing."""
        devices = [torch.device("cpu")] * self._uses_cpu + list(self._devices)
        return " ".join(filter(None, map(prepare, devices)))  # which have been prepared by now

    def flush(self) -> None:
        """Launch what waits, before any code writes to a tensor that was added as stable."""
        for device in self._devices.values():
            device.flush()

    def take(self, step: int, scale: float) -> dict[Role, Frame]:
        """A frame for each role that was counted. Starts anew. Waits for a device."""
        return self.collect(step, scale).frames()

    def collect(self, step: int, scale: float) -> PendingFrames:
        """As :meth:`take`, with counts that may be on their way from a device."""
        if self._is_clean:  # in most steps of a watch: nothing is asked of a device
            return PendingFrames(step, scale, [], np.zeros((0, RAW_LEN), np.int64), [])
        pending = []
        for device in self._devices.values():
            with own_ops():
                pending.append(device.collect())
        keys = [(row, self._keys[row]) for row in sorted(self._touched)]
        collected = PendingFrames(
            step, scale, keys, self._counts[[row for row, _ in keys]], pending
        )
        self._counts[: len(self._keys)] = 0
        self._touched.clear()
        self._is_clean = True
        return collected

    def _row(self, key: _Key) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._keys)
            self._keys.append(key)
            if row == len(self._counts):
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._memory = self._counts, self._counts.ctypes.data
        return row

    def _count(self, tensor: Tensor, row: int, stable: bool) -> None:
        _held, address = self._memory  # another thread may make the table larger meanwhile
        if count_small_into(tensor, address + row * _ROW_BYTES):
            return
        with own_ops():
            if tensor.device.type == "cpu":
                self._uses_cpu = True
                count_into(tensor, self._counts[row])
                return
            if reason := unreadable(tensor):
                raise Unreadable(reason)  # there may be no device to count on
            device = self._devices.get(tensor.device)
            if device is None:
                device = self._devices[tensor.device] = DeviceCounter(tensor.device)
            device.add(tensor, row, stable=stable)


class PendingFrames:
    """Counts of one step: those of a CPU are here, others may be on their way from a device."""

    def __init__(
        self, step: int, scale: float, keys: list[tuple[int, _Key]], counts: Raw,
        pending: list[PendingCounts],
    ) -> None:  # fmt: skip
        """``counts[i]`` belongs to the row and key ``keys[i]``; ``pending`` is to be added."""
        self._step, self._scale = step, scale
        self._keys, self._counts, self._pending = keys, counts, pending

    @property
    def roles(self) -> set[Role]:
        """What was counted."""
        return {role for _, (role, _, _) in self._keys}

    @property
    def is_here(self) -> bool:
        """Whether nothing comes from a device."""
        return not self._pending

    def frames(self) -> dict[Role, Frame]:
        """A frame for each role that was counted. Waits for a device whose counts have not
        arrived."""
        for one in self._pending:
            with own_ops():
                rows = one.rows()
            for place, (row, _) in enumerate(self._keys):
                if row < len(rows):
                    self._counts[place] += rows[row]
        self._pending = []
        frames = {}
        for role in Role:
            places = [place for place, (_, key) in enumerate(self._keys) if key[0] is role]
            if places:
                keys = [self._keys[place][1] for place in places]
                frames[role] = Frame(
                    step=self._step,
                    role=role,
                    modules=tuple(owner for _, owner, _ in keys),
                    dtypes=tuple(dtype_name(dtype) for _, _, dtype in keys),
                    rows=self._counts[places],
                    scale=self._scale if role.is_gradient else 1.0,
                )
        return frames
