"""Which gradients still carry a loss scale: scaled by a backward, not unscaled since."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.script.optimizer_facts import parameters_of


class CarriedScale:
    """Follows scaled backward passes, ``unscale_`` and ``update``, one optimizer at a time."""

    def __init__(self) -> None:
        self.pending = False  # the last backward's gradients carry a scale
        self._unscaled: dict[int, int] = {}  # id of an optimizer -> id of the scaler
        self._by_user: set[int] = set()  # the same optimizers, where the script itself called it

    def unscaled(self, optimizer: Optimizer, scaler: Any, *, by_user: bool) -> None:
        """``scaler.unscale_(optimizer)`` was called."""
        self._unscaled[id(optimizer)] = id(scaler)
        if by_user:
            self._by_user.add(id(optimizer))

    def updated(self, scaler: Any) -> None:
        """``scaler.update()``: the optimizers that it unscaled begin anew; those of another
        scaler do not (two networks that take turns)."""
        own = {key for key, by in self._unscaled.items() if by == id(scaler)}
        self._by_user -= own
        for key in own:
            del self._unscaled[key]

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Unscaled since the last update, by whomever."""
        return id(optimizer) in self._unscaled

    def is_unscaled_by_user(self, optimizer: Optimizer) -> bool:
        """Unscaled by a call of the script's own."""
        return id(optimizer) in self._by_user

    def carries(self, parameters: list[Tensor], optimizers: list[Optimizer]) -> bool:
        """Whether gradients of these parameters were scaled and not unscaled yet."""
        if not self.pending:
            return False
        held = {id(p) for p in parameters if p.grad is not None}
        owned = [(o, held & {id(p) for p in parameters_of(o)}) for o in optimizers]
        # An optimizer that was replaced by another still lives: one that unscaled is enough.
        unscaled = {key for o, keys in owned if self.is_unscaled(o) for key in keys}
        return not unscaled or any(keys - unscaled for _, keys in owned)
