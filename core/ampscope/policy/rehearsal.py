"""Make CPU autocast follow CUDA's op lists, so that a CPU rehearses what a GPU would run.

CPU autocast has lists of its own: under fp16 it leaves exp, log, pow, softmax, sum and the norms
in fp16, which CUDA runs in fp32; it accepts `binary_cross_entropy`, which CUDA refuses; and on a
CPU without fp16 instructions it cannot run nn.LSTM at all. Inside `cuda_autocast_lists()` the
dispatcher's kernels for CPU autocast are CUDA's:

    with cuda_autocast_lists(), torch.autocast("cpu", torch.float16):
        y = model(x)                # casts as on CUDA

Three kinds of op, decided from the data in `autocast_lists`:
- CUDA and the CPU have the same policy: torch's own C++ kernel stays (most matmuls and losses);
- CUDA has another policy: a Python kernel (below) is registered over the CPU's;
- only the CPU casts it: a fallthrough is registered, so the op runs uncast, as on CUDA.

Each of CUDA's policies is a function that wraps one op: switch autocast off, cast the inputs, call
the op, switch autocast on again (the templates `WrapFunction_` and `cached_cast` of
`ATen/autocast_mode.h` are the model). *Eligible* for a cast is a floating-point tensor that is not
double. CUDA also asks that it lie on the GPU; here every CPU tensor counts, so a CPU scalar that
CUDA would leave alone is cast too.

Registrations belong to the process, so they are counted: the last exit takes them back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from ampscope.patches import Patches
from ampscope.policy.autocast_lists import BANNED_MESSAGE, CPU_LISTS, CUDA_LISTS
from ampscope.policy.precision import Op, is_eligible, registered

_KEY: Final = "AutocastCPU"
_OF_CUDA_BUILDS: Final = frozenset({"_cudnn_rnn"})  # every build registers the rest of CUDA's
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
_patches = Patches()
_depth = 0
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = Mapping[str, Any]

# The wrapper of `_cudnn_rnn` (ATen/cudnn/AutocastRNN.cpp) casts to kHalf, also under bf16 autocast.
CUDNN_RNN_DTYPE: Final = torch.float16

# Parameters that were cast in this autocast region: the cast, and the parameter itself, held so
# that its id stays its own. Autocast's C++ cache cannot be reached from Python.
_weight_casts: dict[int, tuple[Tensor, Tensor]] = {}


@contextmanager
def cuda_autocast_lists() -> Iterator[None]:
    """CPU autocast casts by CUDA's lists inside, by its own again after; may be nested."""
    global _depth
    with _lock:
        if _depth == 0:
            _registered.append(registered(_plan(), _KEY))
            _patches.wrap(torch, "clear_autocast_cache", _clear_both)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _patches.undo()
                _weight_casts.clear()
                _registered.pop()._destroy()  # type: ignore[no-untyped-call]  # torch's is untyped


def _clear_both(original: Callable[[], None]) -> None:
    """torch.autocast's outermost exit looks this name up in the torch module."""
    original()
    _weight_casts.clear()


def _plan() -> dict[str, Op]:
    """The kernel to register for each op whose policy on the CPU is not CUDA's.

    What each casts is asked of the dispatcher, so that another torch's extra casts on the CPU go
    too, and what another torch does not cast on CUDA yet (rms_norm in 2.11) is left alone.
    """
    casts_on_cpu = _cast_by(_KEY)
    casts_on_cuda = _cast_by("AutocastCUDA") | _OF_CUDA_BUILDS
    same = {op for name, ops in CPU_LISTS.items() for op in ops & CUDA_LISTS[name] & casts_on_cpu}
    on_cuda = {op: name for name, ops in CUDA_LISTS.items() for op in ops if op in casts_on_cuda}
    plan: dict[str, Op] = dict.fromkeys(casts_on_cpu - on_cuda.keys(), fallthrough_kernel)
    for op in on_cuda.keys() - same:
        if (overload := _overload(op)) is not None:
            plan[op] = _kernel(op, overload, on_cuda[op])
    for op in _RNN_OPS:
        if (overload := _overload(op)) is not None:
            plan[op] = cudnn_rnn(overload)
    return plan


def _cast_by(key: str) -> set[str]:
    """Names of the ops that have a kernel of their own under this key in the running torch."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {op.removeprefix("aten::") for op in found}


def _kernel(op: str, overload: torch._ops.OpOverload, policy: str) -> Op:
    match policy:
        case "lower_precision_fp":
            return lower_precision(overload)
        case "fp32":
            return fp32(overload)
        case "promote":
            return promote(overload)
        case "banned":
            return banned
        case "fp32_set_opt_dtype":
            names = [argument.name for argument in overload._schema.arguments]
            return fp32_set_opt_dtype(overload, names.index("dtype"))
        case "fp32_append_dtype":
            target, defaults = _WITH_DTYPE[op]
            with_dtype = _overload(target)
            assert with_dtype is not None, f"torch has {op} but not {target}"
            return fp32_append_dtype(with_dtype, defaults)
        case _:
            raise ValueError(f"autocast_lists names a policy without a kernel: {policy}")


def _overload(op: str) -> torch._ops.OpOverload | None:
    """The op's overload, or None where this torch has no such op (releases add and drop a few)."""
    name, _, overload = op.partition(".")
    found = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def lower_precision(op: Op) -> Op:
    """Run `op` on inputs cast to autocast's dtype."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        return _cast_and_call(op, torch.get_autocast_dtype("cpu"), args, kwargs)

    return _without_autocast(call)


def fp32(op: Op) -> Op:
    """Run `op` on inputs cast to fp32."""
    return _without_autocast(partial(_cast_and_call, op, torch.float32))


def cudnn_rnn(op: Op) -> Op:
    """Run a whole RNN on inputs, state and weights cast to fp16."""
    return _without_autocast(partial(_cast_and_call, op, CUDNN_RNN_DTYPE))


def promote(op: Op) -> Op:
    """Run `op` on inputs cast to the widest dtype among them."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        dtype = _widest([*args, *kwargs.values()], torch.get_autocast_dtype("cpu"))
        return _cast_and_call(op, dtype, args, kwargs)

    return _without_autocast(call)


def fp32_set_opt_dtype(op: Op, dtype_position: int) -> Op:
    """Run `op` with `dtype=float32` unless the caller set a dtype or the input is not eligible."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        if not is_eligible(args[0], "cpu") or kwargs.get("dtype") is not None:
            return op(*args, **kwargs)
        if len(args) > dtype_position and args[dtype_position] is not None:
            return op(*args, **kwargs)
        return op(*args[:dtype_position], **{**kwargs, "dtype": torch.float32})

    return _without_autocast(call)


def fp32_append_dtype(op_with_dtype: Op, defaults: Arguments) -> Op:
    """Run the overload that takes a dtype; `defaults` are the op's own, which callers leave out."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        dtype = torch.float32 if is_eligible(args[0], "cpu") else args[0].dtype
        return op_with_dtype(*args, *defaults[len(args) :], **kwargs, dtype=dtype)

    return _without_autocast(call)


def banned(*_args: Any, **_kwargs: Any) -> Any:
    """Refuse the op, in CUDA's words."""
    raise RuntimeError(BANNED_MESSAGE)


def _without_autocast(call: Callable[[Arguments, Keywords], Any]) -> Op:
    """The kernel that makes this call with autocast off."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # It runs only where autocast is on, so putting it back on is putting it back as it was.
        torch.set_autocast_enabled("cpu", False)
        try:
            return call(args, kwargs)
        finally:
            torch.set_autocast_enabled("cpu", True)

    return kernel


def _cast_and_call(op: Op, dtype: torch.dtype, args: Arguments, kwargs: Keywords) -> Any:
    cast_kwargs = {name: cast(arg, dtype) for name, arg in kwargs.items()}
    return op(*[cast(arg, dtype) for arg in args], **cast_kwargs)


def cast(arg: Any, dtype: torch.dtype) -> Any:
    """The argument with its eligible tensors in `dtype`; fp32 weights are cast once a region."""
    if isinstance(arg, Tensor):
        if arg.dtype is dtype or not is_eligible(arg, "cpu"):
            return arg
        return _cached_cast(arg, dtype) if _is_cacheable(arg, dtype) else arg.to(dtype)
    if isinstance(arg, (list, tuple)):
        return [cast(item, dtype) for item in arg]
    return arg


def _is_cacheable(arg: Tensor, dtype: torch.dtype) -> bool:
    return (
        arg.requires_grad
        and arg.is_leaf
        and arg.dtype is torch.float32
        and dtype is torch.get_autocast_dtype("cpu")
        and not arg._is_view()
        and torch.is_autocast_cache_enabled()
    )


def _cached_cast(arg: Tensor, dtype: torch.dtype) -> Tensor:
    held = _weight_casts.get(id(arg))
    if held is None:
        held = _weight_casts[id(arg)] = (arg.to(dtype), arg)
    return held[0]


def _widest(
    args: Iterable[Any], lower: torch.dtype, widest: torch.dtype | None = None
) -> torch.dtype:
    widest = widest or lower
    for arg in args:
        if isinstance(arg, (list, tuple)):
            widest = _widest(arg, lower, widest)
        elif is_eligible(arg, "cpu") and widest is not torch.float32:
            if arg.dtype not in (lower, torch.float32):
                # CUDA's text: at::autocast::prioritize knows fp32 and autocast's own dtype only
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
            widest = arg.dtype
    return widest
