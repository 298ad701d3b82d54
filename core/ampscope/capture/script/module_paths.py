"""Dotted paths of modules in an unknown script: which module registered which.

torch calls a global hook whenever a module is registered in another. Climbing these links from a
module that runs gives the path in its outermost model, also when the script calls submodules one by
one. Copies made by ``deepcopy`` register nothing; they are named when their root first runs.

How many of a script's FLOPs ran in which dtype is counted here too.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.analysis.op_precision import NO_ARITHMETIC, SCALER_PREFIX
from ampscope.capture.failures import Failures
from ampscope.capture.global_hooks import FORWARD_ALWAYS, FORWARD_PRE, REGISTERED, Subscription
from ampscope.capture.op_trace import Flops
from ampscope.capture.user_objects import IdMap, IdSet, children, modules
from ampscope.numerics.formats import dtype_name

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "OptimizedModule")


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside the wrappers of parallel training and of torch.compile, whose names
    are in no path."""
    while type(model).__name__ in _WRAPPERS and (inside := children(model)):
        model = inside[0][1]
    return model


class ModulePaths:
    """Keeps the stack of running modules and the names of all modules that ever ran."""

    def __init__(self, failures: Failures | None = None) -> None:
        self.failures = failures or Failures()
        self.stack: list[nn.Module] = []
        self.roots: list[weakref.ref[nn.Module]] = []
        self._parent: IdMap[nn.Module, tuple[weakref.ref[nn.Module], str]] = IdMap()
        self._known: IdSet[nn.Module] = IdSet()
        self._handles: list[Subscription] = []

    def __enter__(self) -> ModulePaths:
        hook = partial(self.failures.hook, "which modules ran")
        self._handles = [
            REGISTERED.subscribe(hook(self.link)),
            FORWARD_PRE.subscribe(hook(self._enter_module)),
            FORWARD_ALWAYS.subscribe(hook(self._leave_module)),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self.stack.clear()

    def current(self) -> nn.Module | None:
        """Innermost running module."""
        return self.stack[-1] if self.stack else None

    def path(self, module: nn.Module | None) -> str:
        """Dotted path below the outermost model; "" for a model itself."""
        if module is None:
            return ""
        parts: list[str] = []
        link = self._parent.get(module)
        while link is not None:
            parent = link[0]()
            if parent is None:
                break
            if type(parent).__name__ not in _WRAPPERS:
                parts.append(link[1])
            link = self._parent.get(parent)
        return ".".join(reversed(parts))

    def root_of(self, module: nn.Module) -> nn.Module:
        """The outermost model that holds ``module``."""
        link = self._parent.get(module)
        while link is not None and (parent := link[0]()) is not None:
            module, link = parent, self._parent.get(parent)
        return module

    def models(self) -> list[nn.Module]:
        """Outermost models that ran and are still alive, in the order of their first run."""
        return [model for ref in self.roots if (model := ref()) is not None]

    def registered(self) -> list[nn.Module]:
        """All modules that are known to belong to another one."""
        return self._parent.keys()

    def link(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """``child`` is registered in ``parent`` as ``name``."""
        if child is not None:
            self._parent[child] = (weakref.ref(parent), name)

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        self.stack.append(module)
        if module not in self._known:
            self.discover(self.root_of(module))

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if self.stack and self.stack[-1] is module:
            self.stack.pop()

    def discover(self, root: nn.Module) -> None:
        """Name everything below ``root``; again at no cost when it is known."""
        if root in self._known:
            return
        for _, parent in modules(root):
            self._known.add(parent)
            for name, child in children(parent):
                self._parent.setdefault(child, (weakref.ref(parent), name))
        if all(ref() is not root for ref in self.roots):
            self.roots.append(weakref.ref(root))


# Instrument: how many of a script's FLOPs ran in which dtype, forward and backward, in all steps.
#
#     fp16 1,204,224   fp32 16,384   and 310 other ops on half-precision numbers


HALF_BYTES = 2  # fp16, bf16 and the narrower float8 formats


class OpPrecision:
    """Counts every op that it is shown; an optimizer's own ops are not for it."""

    def __init__(self) -> None:
        self.half_ops = 0  # ops without a FLOP formula that compute on half-precision numbers
        self._flops = Flops(Failures())
        self._by_dtype: dict[torch.dtype, int] = defaultdict(int)
        self._computes: dict[int, bool] = {}

    def record(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Count one call."""
        flops = self._flops.of(func, args, kwargs, out)
        if flops:
            if (dtype := _compute_dtype(args)) is not None:
                self._by_dtype[dtype] += flops
        elif self._is_arithmetic(func) and any(map(_is_half, args)):
            self.half_ops += 1

    @property
    def ran_half(self) -> bool:
        """Whether any op computed on half-precision numbers."""
        narrow = (d.is_floating_point and d.itemsize <= HALF_BYTES for d in self._by_dtype)
        return self.half_ops > 0 or any(narrow)

    def flops(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names of dtypes, most FLOPs first, and the FLOPs of each."""
        named: dict[str, int] = defaultdict(int)
        for dtype, flops in self._by_dtype.items():
            named[dtype_name(dtype)] += flops
        pairs = sorted(named.items(), key=lambda pair: (-pair[1], pair[0]))
        return tuple(name for name, _ in pairs), tuple(flops for _, flops in pairs)

    def _is_arithmetic(self, func: Any) -> bool:
        known = self._computes.get(id(func))
        if known is None:
            name = getattr(func, "_opname", "")
            known = name not in NO_ARITHMETIC and not name.startswith(SCALER_PREFIX)
            self._computes[id(func)] = known
        return known


def _compute_dtype(args: Sequence[Any]) -> torch.dtype | None:
    """Of the operands, not of a bias or of the scales of a float8 matmul: the narrowest of those
    with two dimensions or more."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    operands = [t for t in tensors if t.dim() > 1] or tensors
    return min((t.dtype for t in operands), key=lambda d: d.itemsize, default=None)


def _is_half(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and value.itemsize <= HALF_BYTES
    return isinstance(value, list | tuple) and any(map(_is_half, value))
