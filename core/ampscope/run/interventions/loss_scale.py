"""Interventions on the settings of every GradScaler: its scale, and how it adapts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampscope.capture.script.patches import Patches


@contextlib.contextmanager
def frozen_scale(scale: float) -> Iterator[None]:
    """Every scaler keeps ``scale``; steps with non-finite gradients are still skipped."""

    def hold(scaler: Any) -> None:
        scaler._init_scale = scale  # a checkpoint that is loaded early replaces it
        if scaler._scale is not None:
            scaler._scale.fill_(scale)

    with _after(("__init__", "update", "load_state_dict"), hold):
        yield


@contextlib.contextmanager
def initial_scale(scale: float) -> Iterator[None]:
    """Every scaler starts at ``scale`` and adapts from there."""

    def start(scaler: Any) -> None:
        scaler._init_scale = scale

    with _after(("__init__",), start):
        yield


@contextlib.contextmanager
def growth_interval(steps: int) -> Iterator[None]:
    """Every scaler grows after this many finite steps, and backs off by half."""

    def set_interval(scaler: Any) -> None:
        scaler._growth_interval, scaler._growth_factor, scaler._backoff_factor = steps, 2.0, 0.5

    with _after(("__init__", "load_state_dict"), set_interval):
        yield


@contextlib.contextmanager
def _after(methods: tuple[str, ...], then: Callable[[Any], None]) -> Iterator[None]:
    """Call ``then(scaler)`` behind each of these methods of an enabled scaler."""
    patches = Patches()

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            if scaler.is_enabled():
                then(scaler)
            return result

        return wrapper

    for name in methods:
        patches.replace(torch.amp.GradScaler, name, make)
    try:
        yield
    finally:
        patches.undo()
