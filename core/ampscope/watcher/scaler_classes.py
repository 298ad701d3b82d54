"""Which classes' methods a GradScaler may run, and whether one is followed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def scaler_classes(scalers: Sequence[Any]) -> Iterator[type]:
    """Those of the given scalers; without any, of every `torch.amp.GradScaler`."""
    if scalers:
        kinds = (kind for scaler in scalers for kind in type(scaler).__mro__)
        yield from dict.fromkeys(kind for kind in kinds if kind is not object)
        return
    waiting: list[type] = [torch.amp.GradScaler]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()


class Followed:
    """Says of a scaler whether it is one of those that are watched; without any, every enabled one
    is."""

    def __init__(self, scalers: Sequence[Any]) -> None:
        self._ids = {id(scaler) for scaler in scalers}

    def __call__(self, scaler: Any) -> bool:
        return (not self._ids or id(scaler) in self._ids) and self.is_enabled(scaler)

    @staticmethod
    def is_enabled(scaler: Any) -> bool:
        """Whether it scales at all. A loss is seen through every such scaler: which optimizer it
        will step is not known yet."""
        return bool(scaler.is_enabled())

    def steps_ours(self, scaler: Any) -> bool:
        """As a call, for a scaler that steps a watched optimizer: one that was not given has taken
        the place of one that was."""
        if self.is_enabled(scaler) and self._ids:
            self._ids.add(id(scaler))
        return self(scaler)
