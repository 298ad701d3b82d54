"""Interventions that compute a part of a script in fp32: modules by path, or the user's own lines;
and one that raises every tiny epsilon."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.patches import Patches
from ampscope.capture.script.source_lines import SourceLines, line_name
from ampscope.capture.tensors import HALF

TINY = 1e-5  # a smaller positive constant next to a tensor is an epsilon; half keeps 6e-8 and up


@contextlib.contextmanager
def fp32_modules(paths: list[str]) -> Iterator[set[str]]:
    """The modules at ``paths`` run with autocast off and their inputs in fp32. Gives the paths that
    did not run yet.

    A module whose parameters are half is widened on its first call, and its output is rounded back,
    so that the rest of a half model still fits to it.
    """
    names, wanted, patches = ModulePaths(), set(paths), Patches()
    missing, depth = set(paths), [0]

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if depth[0] or not _is_wanted(names, module, wanted):
                return original(module, *args, **kwargs)
            missing.discard(names.path(module))
            half = next((p.dtype for p in module.parameters() if p.dtype in HALF), None)
            if half is not None:
                module.float()
            depth[0] += 1
            try:
                with _autocast_off():
                    output = original(module, *_widen(args), **_widen(kwargs))
            finally:
                depth[0] -= 1
            return output if half is None else _narrow(output, half)

        return wrapper

    patches.replace(nn.Module, "__call__", make)
    with names:
        try:
            yield missing
        finally:
            patches.undo()


def _is_wanted(names: ModulePaths, module: nn.Module, wanted: set[str]) -> bool:
    if not names.stack:
        names.discover(names.root_of(module))
    return names.path(module) in wanted


@contextlib.contextmanager
def _autocast_off() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
        yield


@contextlib.contextmanager
def fp32_lines(lines: list[str], own_folder: str) -> Iterator[set[str]]:
    """Every torch call made by these lines of the script computes in fp32. Gives the lines that
    made none yet."""
    with _Fp32Lines(set(lines), own_folder) as mode:
        yield mode.missing


@contextlib.contextmanager
def larger_eps(value: float) -> Iterator[None]:
    """Epsilons below ``value`` become ``value``: of norms, of optimizers, and bare constants."""

    def before_forward(module: nn.Module, args: Any) -> None:
        eps = getattr(module, "eps", None)
        if isinstance(eps, float) and 0 < eps < value:
            setattr(module, "eps", value)  # noqa: B010  # no declared attribute of nn.Module

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if isinstance(group.get("eps"), float):
                group["eps"] = max(group["eps"], value)

    handles = [
        register_module_forward_pre_hook(before_forward),
        register_optimizer_step_pre_hook(before_step),
    ]
    try:
        with _LargerEps(value):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Fp32Lines(TorchFunctionMode):
    def __init__(self, lines: set[str], own_folder: str) -> None:
        super().__init__()
        self.lines = lines
        self.missing = set(lines)
        self.source = SourceLines(own_folder)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        line = line_name(self.source.where())
        if line not in self.lines:
            return func(*args, **kwargs)
        self.missing.discard(line)
        with _autocast_off():
            return func(*_widen(args), **_widen(kwargs))


class _LargerEps(TorchFunctionMode):
    _EPS = ("normalize", "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm",
            "cosine_similarity", "pairwise_distance")  # fmt: skip
    _CONSTANT = ("add", "__add__", "__radd__", "add_", "clamp", "clamp_min", "clamp_", "clamp_min_")

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in self._EPS:
            if "eps" in kwargs or name in ("normalize", "cosine_similarity"):
                kwargs["eps"] = max(kwargs.get("eps") or 0.0, self.value)
        elif name in self._CONSTANT:
            args = (args[0], *(self._raised(a) for a in args[1:]))
            kwargs = {k: self._raised(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)

    def _raised(self, constant: Any) -> Any:
        return self.value if isinstance(constant, float) and 0 < constant < TINY else constant


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, tuple):
        moved = [_widen(v) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [_widen(v) for v in value]
    if isinstance(value, dict):
        return {k: _widen(v) for k, v in value.items()}
    return value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype == torch.float32 else value
    if isinstance(value, tuple):
        return tuple(_narrow(v, dtype) for v in value)
    return value
