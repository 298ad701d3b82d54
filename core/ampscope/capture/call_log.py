"""Instrument: the ordered log of scaler, clip, backward, zero_grad, autocast and checkpoint calls.

Public methods are wrapped and put back on exit. A call inside another watched call is marked
nested: the ``unscale_`` that ``scaler.step`` makes by itself is not the user's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.attempts import Attempts
from ampscope.capture.checkpoint_facts import has_scaler_state
from ampscope.capture.op_watch import OpWatch, root_of_loss, unmark
from ampscope.capture.patches import Patches
from ampscope.capture.source_lines import line_name
from ampscope.formats import dtype_name
from ampscope.observations import Call

MAX_CALLS = 20_000
SCALED = "ampscope_scaler"  # key in an autograd node's metadata


class CallLog:
    """Wraps torch's methods while entered; the log is :attr:`calls`."""

    def __init__(self, watch: OpWatch, attempts: Attempts) -> None:
        self.calls: list[Call] = []
        self.watch = watch
        self.attempts = attempts
        self.scalers: list[Any] = []
        self._depth = 0
        self._autocast: list[str] = []
        self._seen_autocast: set[tuple[str, str]] = set()
        self._patches = Patches()
        attempts.scale_of = self.scale_of
        attempts.on_optimizer = watch.set_in_optimizer
        attempts.on_direct_step = lambda name, lr: self.add("optimizer_step", subject=name)

    def __enter__(self) -> CallLog:
        scaler = torch.amp.GradScaler
        wrap = self._patches.replace
        wrap(scaler, "__init__", self._scaler_new)
        wrap(scaler, "scale", self._scale)
        wrap(scaler, "unscale_", self._unscale)
        wrap(scaler, "step", self._scaler_step)
        wrap(scaler, "update", self._update)
        wrap(scaler, "get_scale", self._simple("get_scale"))
        wrap(scaler, "state_dict", self._simple("scaler_state_dict"))
        wrap(scaler, "load_state_dict", self._simple("scaler_load_state_dict"))
        wrap(torch.Tensor, "backward", self._backward)
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch.autograd, "grad", self._grad)
        wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        wrap(torch.nn.Module, "zero_grad", self._zero_grad)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                wrap(owner, name, self._clip)
        wrap(torch.amp.autocast_mode.autocast, "__enter__", self._autocast_enter)
        wrap(torch.amp.autocast_mode.autocast, "__exit__", self._autocast_exit)
        wrap(torch.autograd.Function, "apply", self._function_apply)
        wrap(torch.Tensor, "__reduce_ex__", self._reduce)
        wrap(torch.nn.Parameter, "__reduce_ex__", self._reduce)
        wrap(torch, "save", self._checkpoint("save"))
        wrap(torch, "load", self._checkpoint("load"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._patches.undo()

    def add(self, name: str, **facts: Any) -> None:
        """Append one call at the user's line that made it."""
        if len(self.calls) < MAX_CALLS:
            line = line_name(self.watch.lines.where())
            self.calls.append(
                Call(
                    seq=len(self.calls),
                    attempt=self.attempts.count,
                    name=name,
                    nested=self._depth > 0,
                    line=line,
                    **facts,
                )
            )

    def scaler_name(self, scaler: Any) -> str:
        for number, known in enumerate(self.scalers):
            if known is scaler:
                return f"scaler{number}"
        self.scalers.append(scaler)
        return f"scaler{len(self.scalers) - 1}"

    def scale_of(self, scaler: Any) -> float:
        """The scaler's scale, read without leaving a trace in the log."""
        return float(self._inside(scaler.get_scale))

    def _inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; what it calls in turn is nested."""
        self._depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._depth -= 1

    def _scaler_new(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            enabled = scaler.is_enabled()
            value = self.scale_of(scaler) if enabled else None
            self.add("scaler_new", subject=self.scaler_name(scaler), value=value, enabled=enabled)

        return wrapper

    def _scale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, outputs: Any) -> Any:
            scaled = self._inside(original, scaler, outputs)
            if not scaler.is_enabled():
                return scaled
            name = self.scaler_name(scaler)
            for tensor in (scaled,) if isinstance(scaled, Tensor) else _flat(scaled):
                if tensor.grad_fn is not None:
                    _metadata(tensor.grad_fn)[SCALED] = name
            value = self.scale_of(scaler)
            self.add("scale", subject=name, value=value, scaled=True)
            return scaled

        return wrapper

    def _unscale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any) -> Any:
            if scaler.is_enabled():
                name = self.attempts.optimizer_name(optimizer)
                self.add("unscale_", subject=self.scaler_name(scaler), note=name)
                self.attempts.before_unscale(optimizer, scaler, nested=self._depth > 0)
            return self._inside(original, scaler, optimizer)

        return wrapper

    def _scaler_step(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            name = self.scaler_name(scaler)
            self.add("scaler_step", subject=name, note=self.attempts.optimizer_name(optimizer))
            with self.attempts.through_scaler(optimizer, scaler, name):
                return self._inside(original, scaler, optimizer, *args, **kwargs)

        return wrapper

    def _update(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = self._inside(original, scaler, *args, **kwargs)
            if scaler.is_enabled():
                name = self.scaler_name(scaler)
                self.add("update", subject=name, value=self.scale_of(scaler))
                self.attempts.after_update(scaler)
            return result

        return wrapper

    def _simple(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                result = self._inside(original, scaler, *args, **kwargs)
                if name != "get_scale" or self._depth == 0:
                    self.add(name, subject=self.scaler_name(scaler))
                return result

            return wrapper

        return make

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._note_backward(_flat(roots), create_graph=bool(kwargs.get("create_graph")))
            return self._inside(original, roots, *args, **kwargs)

        return wrapper

    def _note_backward(self, roots: list[Tensor], *, create_graph: bool) -> None:
        for root in roots:
            scaler = scaled_by(root)
            value = float(root.detach().float().sum()) if root.numel() else math.nan
            scale = 1.0
            for number, known in enumerate(self.scalers):
                if f"scaler{number}" == scaler:
                    scale = self.scale_of(known)
            value = value / scale if scale else value
            self.add(
                "backward",
                subject=scaler,
                value=value,
                scaled=bool(scaler),
                create_graph=create_graph,
                dtype=dtype_name(root.dtype),
                note=root_of_loss(root),
            )
            taint = self.watch.taint_of(root)
            self.attempts.before_backward(value, dtype_name(root.dtype), taint, scaled=bool(scaler))

    def _grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                roots = _flat(outputs)
                self.add(
                    "grad",
                    scaled=any(scaled_by(root) for root in roots),
                    create_graph=bool(kwargs.get("create_graph")),
                )
            return self._inside(original, outputs, *args, **kwargs)

        return wrapper

    def _zero_grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                is_optimizer = isinstance(owner, torch.optim.Optimizer)
                name = self.attempts.optimizer_name(owner) if is_optimizer else "model"
                self.add("zero_grad", subject=name)
            return self._inside(original, owner, *args, **kwargs)

        return wrapper

    def _clip(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            scaled = self.attempts.carries_scale(tensors)
            norm = self._inside(original, tensors, *args, **kwargs)
            value = float(norm) if isinstance(norm, Tensor) else None
            limits = [*args, kwargs.get("max_norm"), kwargs.get("clip_value")]
            limit = next((x for x in limits if x is not None), 0.0)
            self.add("clip", value=value, scaled=scaled, note=f"{float(limit):g}")
            return norm

        return wrapper

    def _autocast_enter(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(region: Any) -> Any:
            enabled = bool(region._enabled)
            dtype = dtype_name(region.fast_dtype) if enabled else ""
            self._autocast.append(dtype)
            self.watch.autocast = dtype
            line = line_name(self.watch.lines.where())
            if (dtype, line) not in self._seen_autocast:
                self._seen_autocast.add((dtype, line))
                self.add("autocast", dtype=dtype, enabled=enabled, note=str(region.device))
            return original(region)

        return wrapper

    def _autocast_exit(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(region: Any, *args: Any) -> Any:
            if self._autocast:
                self._autocast.pop()
            self.watch.autocast = self._autocast[-1] if self._autocast else ""
            return original(region, *args)

        return wrapper

    def _function_apply(self, original: Any) -> Any:
        log, inner = self, original.__func__

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if log.watch.autocast:
                decorated = "autocast_mode" in cls.forward.__code__.co_filename
                log.watch.note_function(cls.__name__, decorated)
            log.watch.functions.append(cls.__name__)
            try:
                return inner(cls, *args, **kwargs)
            finally:
                log.watch.functions.pop()

        return classmethod(apply)

    def _reduce(self, original: Any) -> Any:
        """A tensor that is pickled loses its marks: a checkpoint must not hold them."""

        @functools.wraps(original)
        def wrapper(tensor: Any, protocol: Any) -> Any:
            unmark(tensor)
            return original(tensor, protocol)

        return wrapper

    def _checkpoint(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                result = self._inside(original, *args, **kwargs)
                content = args[0] if name == "save" and args else result
                note = "with scaler state" if has_scaler_state(content) else "without scaler state"
                self.add(name, note=note)
                return result

            return wrapper

        return make


def scaled_by(root: Tensor, depth: int = 24) -> str:
    """Name of the scaler whose ``scale`` is in the graph just above ``root``; "" when none is.

    A scaled loss is often divided for accumulation or summed with others, so nodes within
    ``depth`` steps count.
    """
    seen, queue = set(), [root.grad_fn]
    while queue and depth:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        depth -= 1
        if SCALED in _metadata(node):
            return str(_metadata(node)[SCALED])
        queue.extend(parent for parent, _ in node.next_functions)
    return ""


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, Iterable) else []


def _metadata(node: Any) -> dict[str, object]:
    """An autograd node's own dictionary; torch's stub takes the property for a method."""
    found: dict[str, object] = node.metadata
    return found
