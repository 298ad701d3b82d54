"""The fp32 control with one input moved, by far less than half precision would have rounded it.

How far a training runs away from itself after that is what the least change does to it by chance,
as in reinforcement learning: a difference between half precision and fp32 that is no larger proves
no harm. Moved by a rounding of half, the first site would do the very harm that it is suspected of.
Moved is what the
script casts to half first, or the first input of an op that autocast casts, once; of its elements
those that a half number does not hold and that are no whole numbers, so that ids, counts and masks
stay what they are. The signs are fixed, and nothing is drawn from torch's generators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampscope.capture.tensors import HALF
from ampscope.patches import Patches, within
from ampscope.policy.autocast_lists import CUDA_LISTS

NUDGE = 2.0**-18  # relative: 64 times what fp32 rounds by, at most 1 / 64 of what fp16 does
_METHODS = {torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16}
_CAST_OPS = {name.partition(".")[0] for name in CUDA_LISTS["lower_precision_fp"]} | {"__matmul__"}
_SPREAD = 2_654_435_761  # Knuth's multiplicative hash


@contextlib.contextmanager
def nudged() -> Iterator[None]:
    """Behind ``fp32``: the first input that half precision would have rounded is moved, once."""
    mode = _Nudged()
    with mode, Patches() as patches:
        patches.wrap(torch.amp.autocast_mode.autocast, "__enter__", mode.entered)
        patches.wrap(torch.amp.autocast_mode.autocast, "__exit__", mode.left)
        yield


class _Nudged(TorchFunctionMode):
    """Entered after the mode that replaces half dtypes, it sees what the script asked for, and gets
    the fp32 result."""

    def __init__(self) -> None:
        super().__init__()
        self.is_done = False
        self._regions: list[torch.dtype | None] = []  # autocast's, as the script wrote them

    def entered(self, original: Any, region: Any) -> Any:
        """At ``autocast.__enter__``."""
        self._regions.append(region.fast_dtype if region._enabled else None)
        return original(region)

    def left(self, original: Any, region: Any, *error: Any) -> Any:
        """At ``autocast.__exit__``."""
        if self._regions:
            self._regions.pop()
        return original(region, *error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_done:
            return func(*args, **kwargs)
        region = self._regions[-1] if self._regions else None
        if region in HALF and getattr(func, "__name__", "") in _CAST_OPS:
            args = self._with_one_moved(args, region)
        asked = _METHODS.get(within(func)) or next(
            (a for a in (*args, *kwargs.values()) if type(a) is torch.dtype and a in HALF), None
        )
        result = func(*args, **kwargs)
        if asked in HALF and not self.is_done:
            return self._moved(result, asked)
        return result

    def _with_one_moved(self, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """The arguments of an op; the first one that rounding changes is moved."""
        given = list(args)
        for place, value in enumerate(given):
            if not self.is_done:
                given[place] = self._moved(value, dtype)
        return tuple(given)

    def _moved(self, value: Any, dtype: torch.dtype) -> Any:
        """``value``, moved where ``dtype`` would round it; itself where it would not."""
        if type(value) not in (Tensor, torch.nn.Parameter) or value.dtype is not torch.float32:
            return value
        if value.layout is not torch.strided or not value.numel():
            return value
        with torch._C.DisableTorchFunction(), torch.no_grad():
            rounds = (value.to(dtype).float() != value) & (value.round() != value)
            if not bool(rounds.any()):
                return value
            places = torch.arange(value.numel(), device=value.device) * _SPREAD
            signs = ((places >> 16) & 1).float().reshape(value.shape) * 2 - 1
            factors = torch.where(rounds & value.isfinite(), 1 + signs * NUDGE, 1.0)
        self.is_done = True
        return value * factors
