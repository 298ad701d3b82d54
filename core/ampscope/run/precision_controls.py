"""Controls that change the precision of a whole script: everything in fp32, or fp16 as bf16.

A TorchFunctionMode sees every call of a public torch function, so a dtype that the script asks for
can be replaced before torch sees it: ``.half()``, ``.to(torch.float16)``, ``dtype=torch.float16``.
Autocast is switched by its own ``__enter__``, and GradScaler is created disabled: neither fp32 nor
bf16 needs one. fp32 means fp32 in CUDA's matmuls and convolutions too, so TF32 is off there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ampscope.capture.script.patches import Patches
from ampscope.capture.script.scaler_calls import held_off
from ampscope.capture.tensors import HALF
from ampscope.policy.precision import tf32_switches

# Everything that sets what an fp32 matmul or convolution may compute in ends in one of these.
_TF32_SETTERS = (
    "_set_cublas_allow_tf32",
    "_set_cudnn_allow_tf32",
    "_set_onednn_allow_tf32",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
)


class _Replace(TorchFunctionMode):
    """Replaces half dtypes in arguments by ``target``."""

    def __init__(self, replace: dict[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.replace = replace
        self._methods = {
            torch.Tensor.half: replace.get(torch.float16),
            torch.Tensor.bfloat16: replace.get(torch.bfloat16),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        target = self._methods.get(func)
        if target is not None:
            return args[0].to(target)
        args = tuple(self._swap(a) for a in args)
        kwargs = {k: self._swap(v) for k, v in kwargs.items()} if kwargs else {}
        return func(*args, **kwargs)

    def _swap(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self.replace.get(value, value)
        return value


@contextlib.contextmanager
def everything_fp32() -> Iterator[None]:
    """Autocast off, scalers off, half models and tensors in fp32, and no TF32."""
    replace = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    with scalers_off(), autocast_as(None), tf32_held(False), _Replace(replace):
        yield


@contextlib.contextmanager
def tf32_held(allowed: bool) -> Iterator[None]:
    """fp32 matmuls and convolutions in TF32 or in exact fp32, also where the script sets torch's
    switches itself: inside, setting them does nothing."""
    patches = Patches()

    def unheard(original: Any) -> Any:
        return lambda *args, **kwargs: None

    setters: Any = torch._C
    with tf32_switches(allowed):
        for name in _TF32_SETTERS:
            patches.replace(setters, name, unheard)
        # These properties hold their setter itself, not its name.
        for backend in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
            for name in ("allow_tf32", "fp32_precision"):
                switch = vars(type(backend)).get(name)
                if switch is not None:
                    patches.replace(switch, "setter", unheard)
        try:
            yield
        finally:
            patches.undo()


@contextlib.contextmanager
def half_as_bf16() -> Iterator[None]:
    """fp16 becomes bf16 everywhere, scalers off."""
    with scalers_off(), autocast_as(torch.bfloat16), _Replace({torch.float16: torch.bfloat16}):
        yield


@contextlib.contextmanager
def parameters_fp32() -> Iterator[None]:
    """Half models stay in fp32 and compute under autocast in the precision that they asked for."""
    seen: list[torch.dtype] = []
    patches = Patches()

    def half_model(dtype: torch.dtype) -> Any:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                seen.append(dtype)
                return module

            return wrapper

        return make

    def moved(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            asked = [a for a in (*args, kwargs.get("dtype")) if a in HALF]
            seen.extend(a for a in asked if isinstance(a, torch.dtype))
            kept = [a for a in args if not (isinstance(a, torch.dtype) and a in HALF)]
            kwargs = {k: v for k, v in kwargs.items() if not (k == "dtype" and v in HALF)}
            return original(module, *kept, **kwargs) if kept or kwargs else module

        return wrapper

    def call(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not seen or torch.is_autocast_enabled("cpu"):
                return original(module, *args, **kwargs)
            with torch.autocast("cpu", dtype=seen[-1]):
                return original(module, *args, **kwargs)

        return wrapper

    patches.replace(torch.nn.Module, "half", half_model(torch.float16))
    patches.replace(torch.nn.Module, "bfloat16", half_model(torch.bfloat16))
    patches.replace(torch.nn.Module, "to", moved)
    patches.replace(torch.nn.Module, "__call__", call)
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def scalers_off() -> Iterator[None]:
    """Every GradScaler that is made is disabled."""
    patches = Patches()

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            if scaler._enabled:
                held_off.add(scaler)
            scaler._enabled = False

        return wrapper

    patches.replace(torch.amp.GradScaler, "__init__", make)
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def autocast_as(dtype: torch.dtype | None) -> Iterator[None]:
    """Every autocast region uses ``dtype``; None switches it off."""
    patches = Patches()

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(region: Any) -> Any:
            if dtype is None:
                region._enabled = False
            elif region.fast_dtype is torch.float16:
                region.fast_dtype = dtype
            return original(region)

        return wrapper

    patches.replace(torch.amp.autocast_mode.autocast, "__enter__", make)
    try:
        yield
    finally:
        patches.undo()
