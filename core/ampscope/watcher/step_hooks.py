"""Instrument: sees the steps of somebody else's training loop, taken or skipped.

    scaler.unscale_(opt)    gradients are complete and still scaled (the first of these calls)
    scaler.step(opt)        likewise; when the optimizer's own step does not follow, it was skipped
    optimizer.step()        likewise without a scaler
    scaler.update()         optimizers that were unscaled and did not step are not going to

Optimizers are seen through torch's global hooks, a scaler through its class's methods. Everything
is put back on exit.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer

from ampscope.capture.global_hooks import OPTIMIZER_POST, OPTIMIZER_PRE, Subscription
from ampscope.capture.script.optimizer_facts import has_closure
from ampscope.capture.script.patches import Patches
from ampscope.watcher.containment import Guard
from ampscope.watcher.scaler_classes import Followed, scaler_classes


class StepListener(Protocol):
    """Who is told; every call comes from the thread that trains."""

    def gradients_complete(self, optimizer: Optimizer, scaler: Any) -> None: ...

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...

    def attempt_ended(self, optimizer: Optimizer, *, skipped: bool) -> None: ...

    def attempt_dropped(self, optimizer: Optimizer) -> None: ...


class StepHooks:
    """Tells a listener of every attempted step of the optimizers for which ``is_ours`` holds;
    ``follows`` says which scalers count. A thread that steps one of them is added to ``threads``,
    those that train the watched models; what other threads do is not looked at."""

    def __init__(
        self,
        listener: StepListener,
        is_ours: Callable[[Optimizer], bool],
        follows: Followed,
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
        self._handles: list[Subscription] = []
        self._stepping: Any = None  # the scaler whose step runs
        self._stepped = False
        self._told: dict[int, Optimizer] = {}  # whose gradients were complete in this attempt
        self._is_open = False

    def __enter__(self) -> StepHooks:
        self._is_open = True
        self._handles = [
            OPTIMIZER_PRE.subscribe(self._guard.hook(self._before_step)),
            OPTIMIZER_POST.subscribe(self._guard.hook(self._after_step)),
        ]
        wrappers = {"unscale_": self._unscale, "step": self._step, "update": self._update}
        for kind in scaler_classes(self._scalers):
            for name, make in wrappers.items():
                if name in vars(kind):
                    self._patches.replace(kind, name, make)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._is_open = False  # a wrapper of ours may live on inside somebody else's
        for handle in self._handles:
            handle.remove()
        self._patches.undo()
        self._told.clear()

    def _unscale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._guard.call(self._before_unscale, scaler, optimizer)
            return original(scaler, optimizer)

        return wrapper

    def _step(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._stepping is not None or not self._is_open:
                return original(scaler, optimizer, *args, **kwargs)
            inner = self._guard.call(self._before_scaler, scaler, optimizer)
            if inner is None:
                return original(scaler, optimizer, *args, **kwargs)
            self._stepping, self._stepped = scaler, False
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._stepping = None
            if not self._stepped:
                self._guard.call(self._ended, inner, skipped=True)
            return result

        return wrapper

    def _update(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._guard.call(self._after_update, scaler)
            return result

        return wrapper

    def _before_unscale(self, scaler: Any, optimizer: Any) -> None:
        inner = plain_optimizer(optimizer)
        if self._is_open and self._is_ours(inner) and self._follows.steps_ours(scaler):
            self._complete(inner, scaler)

    def _before_scaler(self, scaler: Any, optimizer: Any) -> Optimizer | None:
        """The optimizer whose attempt begins; None when it is none of ours."""
        inner: Optimizer = plain_optimizer(optimizer)
        if not self._is_ours(inner) or not self._follows.steps_ours(scaler):
            return None
        self._complete(inner, scaler)
        return inner

    def _after_update(self, scaler: Any) -> None:
        here = threading.get_ident() in self._threads  # another's scaler is none of ours
        if here and self._is_open and self._follows(scaler):
            told, self._told = self._told, {}
            for optimizer in told.values():
                self._listener.attempt_dropped(optimizer)

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
        self._ended(optimizer, skipped=skipped)

    def _complete(self, optimizer: Optimizer, scaler: Any) -> None:
        if id(optimizer) not in self._told:
            self._threads.add(threading.get_ident())
            self._told[id(optimizer)] = optimizer
            self._listener.gradients_complete(optimizer, scaler)

    def _ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        self._told.pop(id(optimizer), None)
        self._listener.attempt_ended(optimizer, skipped=skipped)


def plain_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper such as Accelerate's or Lightning's."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner = getattr(optimizer, "optimizer", None)  # Accelerate's wrapper is an Optimizer itself
    return inner if isinstance(inner, Optimizer) else optimizer
