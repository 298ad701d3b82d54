"""Instrument: every op of a step below autocast, by module and phase, with dtypes and FLOPs.

Below autocast the casts that autocast inserted are ops like any other. A forward op belongs to the
innermost module that is running. A backward op belongs to the module whose forward created the
autograd node that is running: nodes carry a sequence number, and each module's forward covers a
range of numbers (torch.profiler links forward and backward ops in the same way).
"""

from __future__ import annotations

import bisect
import hashlib
import time
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]  # bound in C++
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from ampscope.capture.model_map import ModelMap
from ampscope.formats import dtype_name
from ampscope.records import OpRecord

_CAST_OPS = {torch.ops.aten._to_copy.default}
_Key = tuple[int, str, str, str, str, bool]


class OpTrace:
    """Counts ops while entered; :meth:`take` returns the step's ops and an id of their set."""

    def __init__(self, names: ModelMap) -> None:
        self.names = names
        self.phase = "forward"
        self.elapsed_s = 0.0
        self._counts: Counter[_Key] = Counter()
        self._flops: Counter[_Key] = Counter()
        self._stack: list[int] = [0]
        self._starts: list[int] = []  # sequence numbers at which the owner of new nodes changes
        self._owners: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._mode: _Intercept | None = None
        self._names: dict[object, str] = {}

    def __enter__(self) -> OpTrace:
        self._stack = [0]
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._own(0)
        self._mode = _Intercept(self)
        self._mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, where)
        for handle in self._handles:
            handle.remove()
        self._starts.clear()
        self._owners.clear()

    def take(self) -> tuple[int, list[OpRecord]]:
        """(id of the op set, its records); equal sets have equal ids. Starts anew."""
        records = [
            OpRecord(*key[:5], count=count, flops=self._flops[key], is_cast=key[5])
            for key, count in sorted(self._counts.items())
        ]
        self._counts.clear()
        self._flops.clear()
        digest = hashlib.blake2b(repr(records).encode(), digest_size=6).digest()
        return int.from_bytes(digest, "big"), records

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note one call of ``func``."""
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = f"{func.namespace}.{func._opname}"
        inputs, outputs = _dtypes((args, kwargs)), _dtypes(out)
        if not inputs and not outputs:
            return
        module, phase = self._place()
        is_cast = func in _CAST_OPS and inputs != outputs
        key = (module, phase, name, inputs, outputs, is_cast)
        self._counts[key] += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self._flops[key] += int(formula(*args, **kwargs, out_val=out))

    def _place(self) -> tuple[int, str]:
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1], self.phase
        if len(self._stack) > 1:  # activation checkpointing runs a forward inside the backward
            return self._stack[-1], "backward"
        at = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        return (self._owners[at] if at >= 0 else 0), "backward"

    def _own(self, module: int) -> None:
        """From the next autograd node on, new nodes belong to ``module``."""
        number = _get_sequence_nr()
        if self._starts and self._starts[-1] == number:
            self._owners[-1] = module
        else:
            self._starts.append(number)
            self._owners.append(module)

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        index = self.names.index(module)
        self._stack.append(self._stack[-1] if index is None else index)
        self._own(self._stack[-1])

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
        self._own(self._stack[-1])


class _Intercept(TorchDispatchMode):
    """Runs each op and hands it to the trace, which owns the data."""

    def __init__(self, trace: OpTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        started = time.perf_counter()
        self.trace.record(func, args, kwargs, out)
        self.trace.elapsed_s += time.perf_counter() - started
        return out


def _dtypes(value: Any) -> str:
    """Dtypes of the floating-point tensors in arguments, "fp16,fp16,fp32"."""
    found: list[str] = []
    _collect(value, found)
    return ",".join(found)


def _collect(value: Any, found: list[str]) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            found.append(_NAMES.get(value.dtype) or dtype_name(value.dtype))
    elif isinstance(value, list | tuple):
        for part in value:
            _collect(part, found)
    elif isinstance(value, dict):
        for part in value.values():
            _collect(part, found)


_NAMES = {d: dtype_name(d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
