"""Something to do before every clip_grad_norm_ and clip_grad_value_."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.script.patches import Patches


@contextlib.contextmanager
def around_clips(before: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """``before`` gets the parameters whose gradients are about to be clipped."""
    patches = Patches()

    def clip(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            before(tensors)
            return original(tensors, *args, **kwargs)

        return wrapper

    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.replace(owner, name, clip)
    try:
        yield
    finally:
        patches.undo()
