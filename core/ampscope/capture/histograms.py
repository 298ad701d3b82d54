"""Instrument: exponent histograms of what modules put out and of the gradients that come back.

One global forward hook sees every module's output; a tensor hook on that output sees its gradient,
in the dtype in which it really flows and still multiplied by the loss scale. Modules that hand on a
child's very output (``Sequential``) are not counted twice; a module that changes its input in place
(``nn.ReLU(inplace=True)``) hands on the same tensor with other values, and is counted.

What is counted goes into a :class:`~ampscope.capture.accumulator.Accumulator`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.failures import Failures
from ampscope.capture.global_hooks import FORWARD, Subscription
from ampscope.capture.model_map import ModuleNumbers
from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import (
    floating_tensors,
    in_backward,
    is_capturing,
    version,
)
from ampscope.records import Role

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
