"""A GradScaler that tells the probe when gradients are complete and when the optimizer is about to
step, so that a workload's own training step is observed exactly like the default one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class ObservedScaler(torch.amp.GradScaler):
    """Calls ``on_gradients`` before gradients are unscaled and ``on_step`` before the step.

    Both are called with a disabled scaler too, whose four methods are then plain pass-throughs.
    ``on_step`` is told whether the gradients no longer carry the loss scale.
    """

    def __init__(self, device: str, **settings: Any) -> None:
        super().__init__(device, **settings)
        self.on_gradients: Callable[[], None] = _nothing
        self.on_step: Callable[[bool], None] = _nothing
        self._seen: set[int] = set()

    def unscale_(self, optimizer: Optimizer) -> None:
        self._gradients_complete(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        was_unscaled = id(optimizer) in self._seen
        self._gradients_complete(optimizer)
        self.on_step(was_unscaled or not self.is_enabled())
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        self._seen.clear()
        super().update(new_scale)

    def unobserved(self) -> None:
        """Call nobody any more."""
        self.on_gradients = self.on_step = _nothing

    def _gradients_complete(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            self.on_gradients()


def _nothing(*_: object) -> None:
    pass
