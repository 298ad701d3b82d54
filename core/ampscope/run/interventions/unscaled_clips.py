"""Intervention: ``scaler.unscale_(optimizer)`` before every clip of gradients that are scaled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.script.optimizer_facts import parameters_of
from ampscope.capture.script.patches import Patches
from ampscope.run.interventions.clips import around_clips


@contextlib.contextmanager
def unscale_first() -> Iterator[None]:
    """The body's clips see unscaled gradients."""
    watched, patches = _Protocol(), Patches()
    patches.replace(torch.amp.GradScaler, "scale", watched.scale)
    patches.replace(torch.amp.GradScaler, "step", watched.step)
    patches.replace(Optimizer, "__init__", watched.created)
    try:
        with around_clips(watched.unscale):
            yield
    finally:
        patches.undo()


class _Protocol:
    """Which scaler unscales which optimizer: the one that steps it, or the last that scaled."""

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []
        self._stepped_by: dict[int, Any] = {}  # id of an optimizer -> its scaler
        self._last: Any = None

    def scale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, outputs: Any) -> Any:
            self._last = scaler
            return original(scaler, outputs)

        return wrapper

    def step(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._stepped_by[id(optimizer)] = scaler
            return original(scaler, optimizer, *args, **kwargs)

        return wrapper

    def created(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._optimizers.append(optimizer)

        return wrapper

    def unscale(self, parameters: list[Tensor]) -> None:
        """Unscale the optimizers that own some of ``parameters``; of two that own the same one the
        newer, which has taken the other's place."""
        wanted = {id(p) for p in parameters}
        for optimizer in reversed(self._optimizers):
            scaler = self._stepped_by.get(id(optimizer), self._last)
            own = wanted & {id(p) for p in parameters_of(optimizer)}
            wanted -= own
            if own and scaler is not None and scaler.is_enabled():
                with contextlib.suppress(RuntimeError):  # unscaled already, or no gradients yet
                    scaler.unscale_(optimizer)
