"""Instrument: sees the losses of somebody else's training loop.

    scaler.scale(loss)      the unscaled loss of the backward pass that follows
    backward(loss)          the loss itself, where no scaler has scaled one
    optimizer.zero_grad()   gradients that were there are gone, and with them their losses

What a loop does with a scaled loss before it calls backward (a sum, a division) changes nothing:
the losses that were scaled since the last backward pass are what it is called on. Losses of threads
that train something else are not looked at.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.script.patches import Patches
from ampscope.capture.tensors import in_backward, readable
from ampscope.watcher.containment import Guard
from ampscope.watcher.scaler_classes import scaler_classes


class LossListener(Protocol):
    """Who is told; every call comes from the thread that trains."""

    def loss_seen(self, loss: Tensor) -> None: ...

    def losses_dropped(self) -> None: ...

    def backward_ended(self) -> None: ...


class LossHooks:
    """Tells a listener of the losses of ``threads``; ``follows`` says which scalers count."""

    def __init__(
        self,
        listener: LossListener,
        is_ours: Callable[[Optimizer], bool],
        follows: Callable[[Any], bool],
        threads: set[int],
        guard: Guard,
        scalers: Sequence[Any] = (),
    ) -> None:
        self._listener = listener
        self._is_ours = is_ours
        self._follows = follows
        self._threads = threads
        self._guard = guard
        self._scalers = scalers
        self._patches = Patches()
        self._scaled: list[Tensor] = []  # losses whose backward has not begun
        self._is_open = False

    def __enter__(self) -> LossHooks:
        self._is_open = True
        for kind in scaler_classes(self._scalers):
            if "scale" in vars(kind):
                self._patches.replace(kind, "scale", self._scale)
        self._patches.replace(torch.autograd, "backward", self._backward)
        self._patches.replace(Optimizer, "zero_grad", self._zero_grad)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._is_open = False  # a wrapper of ours may live on inside somebody else's
        self._patches.undo()
        self._scaled.clear()

    def _scale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if not torch.compiler.is_compiling():
                self._guard.call(self._note_scaled, scaler, outputs)
            return scaled

        return wrapper

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._guard.call(self._note_backward, tensors)
            result = original(tensors, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._guard.call(self._note_backward_end)
            return result

        return wrapper

    def _note_backward_end(self) -> None:
        if self._is_open and not in_backward():
            self._listener.backward_ended()

    def _note_scaled(self, scaler: Any, outputs: Any) -> None:
        if self._is_here() and self._follows(scaler):
            self._scaled += _losses(outputs)

    def _note_backward(self, tensors: Any) -> None:
        if self._is_here() and not in_backward():  # not inside another
            losses, self._scaled = self._scaled, []
            for loss in losses or _losses(tensors):
                self._listener.loss_seen(loss)

    def _note_zeroed(self, optimizer: Any) -> None:
        if self._is_open and self._is_ours(optimizer):
            self._listener.losses_dropped()

    def _is_here(self) -> bool:
        """Whether this thread is one that trains what is watched."""
        return self._is_open and threading.get_ident() in self._threads

    def _zero_grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._guard.call(self._note_zeroed, optimizer)
            return original(optimizer, *args, **kwargs)

        return wrapper


def _losses(value: Any) -> list[Tensor]:
    """``value`` where it is one number that can be read."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        return []
    loss = readable(value)
    return [] if loss is None else [loss]
