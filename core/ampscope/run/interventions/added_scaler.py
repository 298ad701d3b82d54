"""Intervention: loss scaling for a script that has none.

Every loss is scaled, gradients are unscaled before a clip or a step, whichever comes first, and a
step with gradients that are not finite is left out and halves the scale.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ampscope.capture.script.optimizer_facts import parameters_of
from ampscope.capture.script.patches import Patches
from ampscope.run.interventions.clips import around_clips

INITIAL_SCALE = 65536.0  # GradScaler's own


@contextlib.contextmanager
def add_scaler() -> Iterator[None]:
    """The body's losses are scaled."""
    added, patches = _AddedScaler(), Patches()
    patches.replace(torch.Tensor, "backward", added.backward)
    handle = register_optimizer_step_pre_hook(added.before_step)
    try:
        with around_clips(added.unscale):
            yield
    finally:
        handle.remove()
        patches.undo()


class _AddedScaler:
    def __init__(self) -> None:
        self.scale = INITIAL_SCALE
        self._carried = 0.0  # the scale of the last backward; 0 before the first
        self._unscaled: dict[int, Tensor] = {}  # parameters unscaled since a backward reached them

    def backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(root: Tensor, *args: Any, **kwargs: Any) -> Any:
            before = {key: _written(p) for key, p in self._unscaled.items()}
            self._carried = self.scale
            result = original(root * self.scale, *args, **kwargs)
            for key, written in before.items():
                if _written(self._unscaled[key]) != written:
                    del self._unscaled[key]
            return result

        return wrapper

    def unscale(self, parameters: list[Tensor]) -> None:
        """Divide gradients that still carry the scale by it."""
        for p in parameters:
            if self._carried and p.grad is not None and id(p) not in self._unscaled:
                p.grad.div_(self._carried)
                self._unscaled[id(p)] = p

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Unscale, and leave the step out when a gradient is not finite."""
        if not self._carried:
            return
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        self.unscale(parameters)
        if all(bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None):
            return
        self.scale = min(self.scale, self._carried / 2)  # once, however many optimizers step
        for p in parameters:
            p.grad = None  # optimizers leave parameters without a gradient alone


def _written(parameter: Tensor) -> tuple[int, int]:
    """Changes whenever the parameter's gradient is replaced or written to."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)
