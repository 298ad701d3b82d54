"""A whole script in another precision than its own, for its time and its loss."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ampscope.capture.script.patches import Patches
from ampscope.measure.script_steps import Clock, heard_backward
from ampscope.policy.precision import tf32_switches
from ampscope.run.interventions.added_scaler import add_scaler
from ampscope.run.precision_controls import everything_fp32, half_as_bf16

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@contextlib.contextmanager
def in_precision(name: str, clock: Clock) -> Iterator[None]:
    """The script's own autocast where it has one, else one around every call of a whole model."""
    with contextlib.ExitStack() as stack:
        if name in ("fp32", "tf32"):
            stack.enter_context(everything_fp32())
            if torch.cuda.is_available():
                stack.enter_context(tf32_switches(name == "tf32"))
        else:
            if name == "bf16":
                stack.enter_context(half_as_bf16())
            stack.enter_context(_autocast_around_models(HALVES[name], clock, stack))
        yield


@contextlib.contextmanager
def _autocast_around_models(
    dtype: torch.dtype, clock: Clock, stack: contextlib.ExitStack
) -> Iterator[None]:
    patches = Patches()
    depth = 0
    scales = dtype is torch.float16

    def call(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth, scales
            kind = "cpu" if depth else _device_type(module)
            if depth or torch.is_autocast_enabled(kind):
                if not depth and torch.get_autocast_dtype(kind) is not dtype:
                    clock.foreign = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
                return original(module, *args, **kwargs)
            if scales and clock.losses and not clock.has_scaler:
                scales = False
                stack.enter_context(add_scaler())
                stack.enter_context(heard_backward(clock))
            depth += 1
            try:
                with torch.autocast(kind, dtype=dtype):
                    return original(module, *args, **kwargs)
            finally:
                depth -= 1

        return wrapper

    patches.replace(nn.Module, "__call__", call)
    try:
        yield
    finally:
        patches.undo()


def _device_type(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type
