"""Autocast with some ops on another list: "what if softmax ran in half?".

    with custom_lists(parse("softmax=half,mm=fp32"), "cpu"):
        ...                       # autocast casts by its own lists, but for these ops

Kernels for all overloads of an op are registered over autocast's own, after the templates of
ATen/autocast_mode.h, and taken back on exit. Weights are cast anew at every call (autocast's cache
cannot be reached from Python), which costs time and changes no number. Works on a CPU, on CUDA, and
inside a rehearsal of CUDA's lists.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from ampscope.errors import BadInput

# The arguments of an op are whatever its schema says.
Op: TypeAlias = Callable[..., Any]
_KEYS: Final[Mapping[str, str]] = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_WIDTH: Final[Mapping[torch.dtype, int]] = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1}


@contextmanager
def custom_lists(changes: Mapping[str, str], device_type: str) -> Iterator[None]:
    """The ops of ``changes`` run as their list says (half, fp32, widest, as it comes).

    Raises BadInput for an op that torch does not have.
    """
    if not changes:
        yield
        return
    plan = {name: _overloads(name) for name in changes}
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call] # torch leaves it untyped
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
            for name, overloads in plan.items():
                for overload in overloads:
                    kernel = _kernel(changes[name], overload, device_type)
                    library.impl(_name(overload), kernel, _KEYS[device_type])  # type: ignore[no-untyped-call] # as above
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call] # as above


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        raise BadInput(f"torch has no op {name!r}. Name one as autocast's lists do: softmax, mm.")
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [o for o in found if not o._schema.is_mutable and not o._schema.name.endswith("_out")]


def _name(overload: torch._ops.OpOverload) -> str:
    name = overload._schema.name.removeprefix("aten::")
    return f"{name}.{overload._schema.overload_name}".removesuffix(".")


def _kernel(meaning: str, op: Op, device_type: str) -> Op:
    if meaning == "as it comes":
        return fallthrough_kernel

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # A kernel runs only where autocast is on, so putting it back on is as it was.
        torch.set_autocast_enabled(device_type, False)
        try:
            dtype = _dtype(meaning, [*args, *kwargs.values()], device_type)
            named = {name: _cast(arg, dtype, device_type) for name, arg in kwargs.items()}
            return op(*[_cast(arg, dtype, device_type) for arg in args], **named)
        finally:
            torch.set_autocast_enabled(device_type, True)

    return kernel


def _dtype(meaning: str, values: list[Any], device_type: str) -> torch.dtype:
    if meaning == "half":
        return torch.get_autocast_dtype(device_type)
    if meaning == "fp32":
        return torch.float32
    dtypes = [t.dtype for t in _tensors(values) if _is_eligible(t, device_type)]
    return max(dtypes, key=lambda d: _WIDTH.get(d, 1), default=torch.float32)


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(list(value))


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if _is_eligible(value, device_type) else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, device_type) for item in value]
    return value


def _is_eligible(tensor: Tensor, device_type: str) -> bool:
    """What autocast may cast: floating point, not double, on its device."""
    own = tensor.device.type == device_type
    return own and tensor.is_floating_point() and tensor.dtype is not torch.float64
