"""Intervention: a scaler of its own for each loss of a loop that shares one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampscope.capture.script.patches import Patches


@contextlib.contextmanager
def separate_scalers() -> Iterator[None]:
    """Each loss between two updates gets a scaler of its own, with the settings of the shared one.

    The n-th ``scale`` after an ``update`` uses the n-th scaler, and so do the ``unscale_`` and
    ``step`` calls that follow it: that is how losses and optimizers alternate in a loop.
    """
    patches, shared = Patches(), _Shared()
    scaler = torch.amp.GradScaler
    patches.replace(scaler, "scale", shared.routed(is_next=True))
    for name in ("unscale_", "step", "get_scale"):
        patches.replace(scaler, name, shared.routed(is_next=False))
    patches.replace(scaler, "update", shared.update)
    try:
        yield
    finally:
        patches.undo()


class _Shared:
    """The parts that stand for each of the script's scalers."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Any]] = {}
        self._turn: dict[int, int] = {}  # how many losses were scaled since the last update
        self._inside = False  # a part's own calls are not routed again
        self._new = torch.amp.GradScaler.__init__

    def routed(self, *, is_next: bool) -> Callable[[Any], Any]:
        """Wrapper that hands the call to a part; ``is_next``: to the next one."""

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                if self._inside or not scaler.is_enabled():
                    return original(scaler, *args, **kwargs)
                if is_next:
                    self._turn[id(scaler)] = self._turn.get(id(scaler), 0) + 1
                with self._entered():
                    return original(self._part(scaler), *args, **kwargs)

            return wrapper

        return make

    def update(self, original: Any) -> Any:
        """Every part that saw gradients since the last update adapts."""

        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            self._turn[id(scaler)] = 0
            with self._entered():
                for part in self._parts.get(id(scaler), []):
                    states = part._per_optimizer_states.values()
                    if any(state["found_inf_per_device"] for state in states):
                        original(part)
            return None

        return wrapper

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _part(self, scaler: Any) -> Any:
        parts = self._parts.setdefault(id(scaler), [])
        at = max(self._turn.get(id(scaler), 0) - 1, 0)
        while len(parts) <= at:
            fresh = torch.amp.GradScaler.__new__(torch.amp.GradScaler)
            self._new(
                fresh,
                scaler._device,
                init_scale=scaler._init_scale,
                growth_factor=scaler._growth_factor,
                backoff_factor=scaler._backoff_factor,
                growth_interval=scaler._growth_interval,
            )
            parts.append(fresh)
        return parts[at]
