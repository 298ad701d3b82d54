"""Where an op belongs: which module, and whether forward, backward or the optimizer's step ran it.

A forward op belongs to the innermost module that is running. A backward op belongs to the module
whose forward created the autograd node that is running: nodes carry a sequence number, and each
module's forward covers ranges of numbers (torch.profiler links forward and backward ops in the
same way)::

    number   0 … 4   5 … 9   10 … 11   12 … 20
    owner    root    linear  relu      root

Sequence numbers count up in each thread by themselves. Forward passes of one step run in one
thread, with one exception: reentrant activation checkpointing runs a forward inside the backward
pass, which on CUDA has a thread of its own, and then a backward pass nested in it. That inner
forward therefore gets ranges of its own, and the nested backward pass looks there.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]  # bound in C++

from ampscope.capture.global_hooks import FORWARD_ALWAYS, FORWARD_PRE, Subscription
from ampscope.capture.model_map import ModuleNumbers

NO_BACKWARD = -1  # torch's id of the running backward pass when there is none
_ACCUMULATE = 2**63  # nodes that accumulate into a leaf have the number 2^64 - 1
_ROOT = 0
_MOST_RANGES = 200_000  # kept when a whole training is one pass, about 400 steps of 250 modules


class OpPlace:
    """Follows the running modules while entered; :meth:`now` says where an op belongs."""

    def __init__(self, names: ModuleNumbers) -> None:
        self.names = names
        self.outside = "forward"  # phase of ops outside modules and backward passes
        self._stack = [_ROOT]
        self._forward = _Owners()
        self._repeated = _Owners()
        self._repeated_in = 2**63  # the backward pass that last ran a forward inside
        self._handles: list[Subscription] = []

    def __enter__(self) -> OpPlace:
        self.outside = "forward"
        self._stack = [_ROOT]
        self._repeated_in = 2**63
        self._forward.begin(_ROOT)
        self._handles = [
            FORWARD_PRE.subscribe(self._enter_module),
            FORWARD_ALWAYS.subscribe(self._leave_module),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def now(self) -> tuple[int, str]:
        """(module's number, phase) of the op that is running in this thread."""
        task = torch._C._current_graph_task_id()
        if len(self._stack) > 1:
            return self._stack[-1], "forward" if task == NO_BACKWARD else "backward"
        if task == NO_BACKWARD:
            return _ROOT, self.outside
        node = torch._C._current_autograd_node()
        return (_ROOT if node is None else self._owner(node, task)), "backward"

    def _owner(self, node: Any, task: int) -> int:
        number = node._sequence_nr()
        if number >= _ACCUMULATE:
            owner = self.names.owner(node.variable) if hasattr(node, "variable") else None
            return _ROOT if owner is None else owner
        owners = self._repeated if task > self._repeated_in else self._forward
        return owners.of(number)

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        index = self.names.index(module)
        inside = len(self._stack) > 1
        self._stack.append(self._stack[-1] if index is None else index)
        task = torch._C._current_graph_task_id()
        if task == NO_BACKWARD:
            self.outside = "forward"  # what follows the optimizer's step and no module is its own
            self._forward.next_are(self._stack[-1])
            return
        if not inside:
            self._repeated.begin(_ROOT)
            self._repeated_in = task
        self._repeated.next_are(self._stack[-1])

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
        is_forward = torch._C._current_graph_task_id() == NO_BACKWARD
        (self._forward if is_forward else self._repeated).next_are(self._stack[-1])


class _Owners:
    """Which module created the autograd nodes of which range of sequence numbers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._modules: list[int] = []

    def begin(self, module: int) -> None:
        """Forget everything; nodes from here on belong to ``module``."""
        self._starts, self._modules = [_get_sequence_nr()], [module]

    def next_are(self, module: int) -> None:
        """Nodes from here on belong to ``module``."""
        number = _get_sequence_nr()
        if self._starts and self._starts[-1] == number:
            self._modules[-1] = module
        else:
            self._starts.append(number)
            self._modules.append(module)
            if len(self._starts) > _MOST_RANGES:  # the graphs of the oldest are long gone
                del self._starts[: _MOST_RANGES // 2], self._modules[: _MOST_RANGES // 2]

    def of(self, number: int) -> int:
        at = bisect.bisect_right(self._starts, number) - 1
        return self._modules[at] if at >= 0 else _ROOT
