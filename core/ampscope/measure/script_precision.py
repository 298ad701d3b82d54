"""A whole script in another precision than its own, for its time and its loss.

The controls of a diagnosis look at every torch function, which costs a step of small ops twice its
time (measured: 60 small layers). Here only methods are replaced that a step hardly calls: those
that cast a module or a tensor to a half format by name. A script that has autocast keeps it; around
one that has none a region is opened at the first call of a model and closed before backward, so
that the loss is computed inside, as the documentation of torch.amp has it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ampscope.capture.script.patches import Patches
from ampscope.measure.step_clock import Clock, heard_backward
from ampscope.run.interventions.added_scaler import add_scaler
from ampscope.run.precision_controls import autocast_as, scalers_off, tf32_held

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_BY_NAME = {"half": torch.float16, "bfloat16": torch.bfloat16}


@contextlib.contextmanager
def in_precision(name: str, clock: Clock) -> Iterator[None]:
    """While entered, what is trained in this process is trained in the precision ``name``."""
    with contextlib.ExitStack() as stack:
        if name in ("fp32", "tf32"):
            stack.enter_context(scalers_off())
            stack.enter_context(autocast_as(None))
            stack.enter_context(_halves_as(dict.fromkeys(HALVES.values(), torch.float32)))
            stack.enter_context(tf32_held(name == "tf32"))
        else:
            if name == "bf16":
                stack.enter_context(scalers_off())
                stack.enter_context(autocast_as(torch.bfloat16))
                stack.enter_context(_halves_as({torch.float16: torch.bfloat16}))
            stack.enter_context(_autocast_around_steps(HALVES[name], clock, stack))
        yield


@contextlib.contextmanager
def _halves_as(replace: Mapping[torch.dtype, torch.dtype]) -> Iterator[None]:
    """``.half()``, ``.bfloat16()`` and ``.to(dtype)`` of modules and tensors give another dtype."""
    patches = Patches()

    def by_name(wanted: torch.dtype) -> Any:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(owner: Any, *args: Any, **kwargs: Any) -> Any:
                other = replace.get(wanted)
                return original(owner, *args, **kwargs) if other is None else owner.to(other)

            return wrapper

        return make

    def to(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(owner: Any, *args: Any, **kwargs: Any) -> Any:
            args = tuple(replace.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
            if kwargs.get("dtype") in replace:
                kwargs["dtype"] = replace[kwargs["dtype"]]
            return original(owner, *args, **kwargs)

        return wrapper

    for owner in (nn.Module, torch.Tensor):
        for name, wanted in _BY_NAME.items():
            patches.replace(owner, name, by_name(wanted))
        patches.replace(owner, "to", to)
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def _autocast_around_steps(
    dtype: torch.dtype, clock: Clock, stack: contextlib.ExitStack
) -> Iterator[None]:
    """One region a step, from a model's first call until backward; without gradients, around the
    call alone. fp16 gets a loss scale where the script has none."""
    patches, region = Patches(), contextlib.ExitStack()
    is_open, lacks_scaler = False, dtype is torch.float16

    def close() -> None:
        nonlocal is_open
        is_open = False
        region.close()

    def call(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_open, lacks_scaler
            if is_open:
                return original(module, *args, **kwargs)
            kind = _device_type(module)
            if torch.is_autocast_enabled(kind):
                if torch.get_autocast_dtype(kind) is not dtype:
                    clock.foreign = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
                return original(module, *args, **kwargs)
            if not torch.is_grad_enabled():
                with torch.autocast(kind, dtype=dtype):
                    return original(module, *args, **kwargs)
            if lacks_scaler and clock.losses and not clock.has_scaler:
                lacks_scaler = False
                stack.enter_context(add_scaler())
                stack.enter_context(heard_backward(clock))
            is_open = True
            region.enter_context(torch.autocast(kind, dtype=dtype))
            return original(module, *args, **kwargs)

        return wrapper

    patches.replace(nn.Module, "__call__", call)
    clock.before_backward = close
    try:
        yield
    finally:
        clock.before_backward = _nothing
        close()
        patches.undo()


def _nothing() -> None:
    pass


def _device_type(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type
