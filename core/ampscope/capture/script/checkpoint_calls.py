"""Wrappers of torch.save and torch.load: does a checkpoint hold the state of a GradScaler?

The state is looked for by its keys, at any depth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ampscope.capture.script.calls import Calls
from ampscope.capture.script.op_marks import unmark
from ampscope.capture.script.patches import Patches

_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval"}  # GradScaler.state_dict
MAX_DEPTH = 4


class CheckpointCalls:
    """Logs what is saved and loaded, and keeps the watch's marks out of it."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def wrap(self, patches: Patches) -> None:
        """Put the wrappers on; ``patches`` takes them off."""
        patches.replace(torch.Tensor, "__reduce_ex__", _without_marks)
        patches.replace(torch.nn.Parameter, "__reduce_ex__", _without_marks)
        patches.replace(torch, "save", self._checkpoint("save"))
        patches.replace(torch, "load", self._checkpoint("load"))

    def _checkpoint(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                result = self._calls.inside(original, *args, **kwargs)
                saved = args[0] if args else kwargs.get("obj")
                content = saved if name == "save" else result
                note = "with scaler state" if has_scaler_state(content) else "without scaler state"
                self._calls.add(name, note=note)
                return result

            return wrapper

        return make


def has_scaler_state(value: object, depth: int = 0) -> bool:
    """True when ``value`` is or contains a GradScaler's state_dict."""
    if not isinstance(value, Mapping) or depth > MAX_DEPTH:
        return False
    if value.keys() >= _KEYS:
        return True
    return any(has_scaler_state(part, depth + 1) for part in value.values())


def _without_marks(original: Any) -> Any:
    """A tensor that is pickled loses its marks: a checkpoint must not hold them."""

    @functools.wraps(original)
    def wrapper(tensor: Any, protocol: Any) -> Any:
        unmark(tensor)
        return original(tensor, protocol)

    return wrapper
