"""Instrument: sees the steps of somebody else's training loop, taken or skipped.

    scaler.scale(loss)      the unscaled loss
    backward(loss)          the same, where no scaler is used
    scaler.unscale_(opt)    gradients are complete and still scaled (the first of these calls)
    scaler.step(opt)        likewise; when the optimizer's own step does not follow, it was skipped
    optimizer.step()        likewise without a scaler

Optimizers are seen through torch's global hooks, a scaler through its class's methods. Everything
is put back on exit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ampscope.capture.script.optimizer_facts import has_closure
from ampscope.capture.script.patches import Patches


class StepListener(Protocol):
    """Who is told; every call comes from the thread that trains."""

    def loss_seen(self, loss: Tensor) -> None: ...

    def gradients_complete(self, optimizer: Optimizer, scaler: Any) -> None: ...

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...

    def attempt_ended(self, optimizer: Optimizer, scaler: Any, *, skipped: bool) -> None: ...


class StepHooks:
    """Tells a listener of every attempted step of the optimizers for which ``is_ours`` holds.

    ``scaler`` is the one to follow; None follows every `torch.amp.GradScaler` that steps one of
    ours.
    """

    def __init__(
        self, listener: StepListener, is_ours: Callable[[Optimizer], bool], scaler: Any = None
    ) -> None:
        self._listener = listener
        self._is_ours = is_ours
        self._scaler = scaler
        self._patches = Patches()
        self._handles: list[RemovableHandle] = []
        self._stepping: Any = None  # the scaler whose step runs
        self._stepped = False
        self._told: set[int] = set()  # optimizers whose gradients were complete in this attempt
        self._scaled: set[int] = set()  # ids of losses that a scaler made
        self._depth = 0  # of calls of a scaler inside one another

    def __enter__(self) -> StepHooks:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for kind in _scaler_classes(self._scaler):
            for name, make in (
                ("scale", self._scale),
                ("unscale_", self._unscale),
                ("step", self._step),
            ):
                if name in vars(kind):
                    self._patches.replace(kind, name, make)
        self._patches.replace(torch.autograd, "backward", self._backward)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._patches.undo()

    def _follows(self, scaler: Any) -> bool:
        if self._scaler is not None and scaler is not self._scaler:
            return False
        return bool(scaler.is_enabled())

    def _scale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if self._follows(scaler) and isinstance(outputs, Tensor):
                self._listener.loss_seen(outputs.detach())
                self._scaled.add(id(scaled))
            return scaled

        return wrapper

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            is_loss = isinstance(tensors, Tensor) and tensors.numel() == 1
            if is_loss and id(tensors) not in self._scaled and not _in_backward():
                self._listener.loss_seen(tensors.detach())
            return original(tensors, *args, **kwargs)

        return wrapper

    def _unscale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any) -> Any:
            inner = plain_optimizer(optimizer)
            if self._follows(scaler) and self._is_ours(inner):
                self._complete(inner, scaler)
            return original(scaler, optimizer)

        return wrapper

    def _step(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            inner = plain_optimizer(optimizer)
            if self._stepping is not None or not self._follows(scaler) or not self._is_ours(inner):
                return original(scaler, optimizer, *args, **kwargs)
            self._complete(inner, scaler)
            self._stepping, self._stepped = scaler, False
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._stepping = None
            if not self._stepped:
                self._ended(inner, scaler, skipped=True)
            return result

        return wrapper

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self._stepped = True
        if not has_closure(args, kwargs):  # a closure's gradients come inside the step
            self._complete(optimizer, self._stepping)
        self._listener.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self._complete(optimizer, self._stepping)
        # A fused optimizer is always called; GradScaler hands it found_inf, and it does nothing.
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)
        if not skipped:
            self._listener.after_step(optimizer)
        self._ended(optimizer, self._stepping, skipped=skipped)

    def _complete(self, optimizer: Optimizer, scaler: Any) -> None:
        if id(optimizer) not in self._told:
            self._told.add(id(optimizer))
            self._listener.gradients_complete(optimizer, scaler)

    def _ended(self, optimizer: Optimizer, scaler: Any, *, skipped: bool) -> None:
        self._told.discard(id(optimizer))
        self._scaled.clear()
        self._listener.attempt_ended(optimizer, scaler, skipped=skipped)


def plain_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper such as Accelerate's or Lightning's."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner = getattr(optimizer, "optimizer", None)  # Accelerate's wrapper is an Optimizer itself
    return inner if isinstance(inner, Optimizer) else optimizer


def _scaler_classes(scaler: Any) -> Iterator[type]:
    """The classes whose methods a followed scaler may run."""
    if scaler is not None:
        yield from (kind for kind in type(scaler).__mro__ if kind is not object)
        return
    waiting: list[type] = [torch.amp.GradScaler]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
