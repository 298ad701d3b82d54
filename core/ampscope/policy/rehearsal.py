"""Make CPU autocast follow CUDA's op lists, so that a CPU rehearses what a GPU would run.

CPU autocast has lists of its own: under fp16 it leaves exp, log, pow, softmax, sum and the norms
in fp16, which CUDA runs in fp32; it accepts `binary_cross_entropy`, which CUDA refuses; and on a
CPU without fp16 instructions it cannot run nn.LSTM at all. Inside `cuda_autocast_lists()` the
dispatcher's kernels for CPU autocast are CUDA's:

    with cuda_autocast_lists(), torch.autocast("cpu", torch.float16):
        y = model(x)                # casts as on CUDA

Three kinds of op, decided from the data in `autocast_lists`:
- CUDA and the CPU have the same policy: torch's own C++ kernel stays (most matmuls and losses);
- CUDA has another policy: a Python kernel of `cast_kernels` is registered over the CPU's;
- only the CPU casts it: a fallthrough is registered, so the op runs as it is, as on CUDA.

Registrations belong to the process, so they are counted: the last exit takes them back.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.library import Library, fallthrough_kernel

from ampscope.policy import cast_kernels
from ampscope.policy.autocast_lists import CPU_LISTS, CUDA_LISTS
from ampscope.policy.cast_kernels import Op

_KEY: Final = "AutocastCPU"
# On CUDA these reach `_cudnn_rnn`, whose wrapper casts everything; a CPU has no such op in between.
_RNN_OPS: Final = tuple(
    f"{cell}.{form}"
    for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form in ("input", "data")
)
# norm(self, p=2), norm(self, p, dim, keepdim=False): the overload with a dtype, and the defaults.
_WITH_DTYPE: Final[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "norm.Scalar": ("norm.ScalarOpt_dtype", (None, 2)),
    "norm.ScalarOpt_dim": ("norm.ScalarOpt_dim_dtype", (None, None, None, False)),
}

_lock = threading.Lock()
_registered: list[Library] = []
_depth = 0


@contextmanager
def cuda_autocast_lists() -> Iterator[None]:
    """CPU autocast casts by CUDA's lists inside, by its own again after; may be nested."""
    _enter()
    try:
        yield
    finally:
        _exit()


def _enter() -> None:
    global _depth
    with _lock:
        if _depth == 0:
            _registered.append(_register(_plan()))
            torch.clear_autocast_cache = _clear_both_caches
        _depth += 1


def _exit() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            torch.clear_autocast_cache = _clear_autocast_cache
            cast_kernels.clear_weight_casts()
            _registered.pop()._destroy()  # type: ignore[no-untyped-call] # torch leaves it untyped


_clear_autocast_cache = torch.clear_autocast_cache


def _clear_both_caches() -> None:
    # torch.autocast's outermost exit looks this name up in the torch module.
    _clear_autocast_cache()
    cast_kernels.clear_weight_casts()


def _plan() -> dict[str, Op]:
    """The kernel to register for each op whose policy on the CPU is not CUDA's.

    What the CPU casts is asked of the dispatcher, so that another torch's extra casts go too.
    """
    casts_on_cpu = {
        op.removeprefix("aten::")
        for op in torch._C._dispatch_get_registrations_for_dispatch_key(_KEY)
    }
    same = {op for name, ops in CPU_LISTS.items() for op in ops & CUDA_LISTS[name] & casts_on_cpu}
    on_cuda = {op: name for name, ops in CUDA_LISTS.items() for op in ops}
    plan: dict[str, Op] = dict.fromkeys(casts_on_cpu - on_cuda.keys(), fallthrough_kernel)
    for op in on_cuda.keys() - same:
        if (overload := _overload(op)) is not None:
            plan[op] = _kernel(op, overload, on_cuda[op])
    for op in _RNN_OPS:
        if (overload := _overload(op)) is not None:
            plan[op] = cast_kernels.cudnn_rnn(overload)
    return plan


def _kernel(op: str, overload: torch._ops.OpOverload, policy: str) -> Op:
    match policy:
        case "lower_precision_fp":
            return cast_kernels.lower_precision(overload)
        case "fp32":
            return cast_kernels.fp32(overload)
        case "promote":
            return cast_kernels.promote(overload)
        case "banned":
            return cast_kernels.banned
        case "fp32_set_opt_dtype":
            names = [argument.name for argument in overload._schema.arguments]
            return cast_kernels.fp32_set_opt_dtype(overload, names.index("dtype"))
        case "fp32_append_dtype":
            target, defaults = _WITH_DTYPE[op]
            with_dtype = _overload(target)
            assert with_dtype is not None, f"torch has {op} but not {target}"
            return cast_kernels.fp32_append_dtype(with_dtype, defaults)
        case _:
            raise ValueError(f"autocast_lists names a policy without a kernel: {policy}")


def _overload(op: str) -> torch._ops.OpOverload | None:
    """The op's overload, or None where this torch has no such op (releases add and drop a few)."""
    name, _, overload = op.partition(".")
    found = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def _register(plan: Mapping[str, Op]) -> Library:
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call] # torch leaves it untyped
    with warnings.catch_warnings():
        # torch warns once a process that a kernel is overridden; overriding is what is meant here
        warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
        for op, kernel in plan.items():
            library.impl(op, kernel, _KEY)  # type: ignore[no-untyped-call] # as above
    return library
