"""Which classes' methods a GradScaler may run, and whether one is followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def scaler_classes(scaler: Any) -> Iterator[type]:
    """Those of one scaler; with None, of every `torch.amp.GradScaler`."""
    if scaler is not None:
        yield from (kind for kind in type(scaler).__mro__ if kind is not object)
        return
    waiting: list[type] = [torch.amp.GradScaler]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()


class Followed:
    """Says of a scaler whether it is the one that is watched; with None, every enabled one is."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def __call__(self, scaler: Any) -> bool:
        if self._scaler is not None and scaler is not self._scaler:
            return False
        return bool(scaler.is_enabled())
