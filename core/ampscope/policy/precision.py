"""Put a precision mode into effect: autocast, the dtype of the model, and the TF32 switches.

precision = resolve("fp16", "cuda")
convert_model(model, precision)
with step_arithmetic(precision, "cuda"):         # the whole step: backward computes as forward does
    with forward_autocast(precision, "cuda"):    # the forward pass and the loss alone
        loss = workload.loss(model, batch)
    loss.backward()

Autocast notes its casts in the graph, so backward follows it without being inside. A TF32 switch is
read by every op when it runs, so a step that leaves the switch after its forward pass computes its
backward pass in another precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from ampscope.errors import BadInput
from ampscope.policy.autocast_lists import HalfDtype, Precision

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# The arguments of an op are whatever its schema says.
Op: TypeAlias = Callable[..., Any]
_KEYS: Final[Mapping[str, str]] = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_WIDTH: Final[Mapping[torch.dtype, int]] = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1}


def torch_dtype(name: HalfDtype) -> torch.dtype:
    """The dtype that a mode names."""
    return _DTYPES[name]


def convert_model(model: torch.nn.Module, precision: Precision) -> None:
    """Give the model the weights of the mode, in place; only the pure modes change anything."""
    if precision.model_dtype is not None:
        model.to(torch_dtype(precision.model_dtype))


def _check_hardware(precision: Precision, device_type: str) -> None:
    if device_type != "cuda":
        return
    if not torch.cuda.is_available():
        raise BadInput("There is no CUDA device that this torch can use. Choose the device cpu.")
    if precision.tf32 and torch.cuda.get_device_capability() < (8, 0):
        major, minor = torch.cuda.get_device_capability()
        raise BadInput(
            f"TF32 needs compute capability 8.0 or newer, and this GPU has {major}.{minor}."
            " Choose fp32 instead."
        )


@contextmanager
def step_arithmetic(precision: Precision, device_type: str) -> Iterator[None]:
    """The switches of fp32 matmuls and convolutions as the mode wants them, for a whole step:
    forward, backward and optimizer; as they were on exit.

    Raises BadInput where the GPU cannot do what the mode asks.
    """
    _check_hardware(precision, device_type)
    if precision.tf32 is None:
        yield
    elif device_type == "cuda":
        with tf32_switches(precision.tf32):
            yield
    else:
        with _kept(_onednn_switches()):
            for switch in () if precision.tf32 else _onednn_switches():
                switch.fp32_precision = "ieee"
            yield


def forward_autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """Autocast as the mode wants it, for the forward pass and the loss."""
    if precision.autocast_dtype is None:
        # fp32 means fp32 and pure means pure, also inside a caller's autocast
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=torch_dtype(precision.autocast_dtype))


@contextmanager
def tf32_switches(allowed: bool) -> Iterator[None]:
    """CUDA's matmuls and convolutions in TF32 or in exact fp32 (cuDNN's default is TF32).

    torch has two generations of these switches and raises where they disagree, so both are set:
    the old ones first, then the new ones by name, because the old ones say "not TF32" as "none",
    which takes the value of ``torch.backends.fp32_precision``. In exact fp32 oneDNN's switches are
    off as well: with ``torch.set_float32_matmul_precision("medium")`` a CPU may compute fp32
    matmuls in bf16. All have their own values again on exit.
    """
    matmul: Any = torch.backends.cuda.matmul  # Any: the newer switches have no type hints
    cudnn: Any = torch.backends.cudnn
    cuda = (matmul, cudnn.conv, cudnn.rnn)
    with _kept((*cuda, *_onednn_switches())):
        before = (matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32")
        named = ""  # not to be read where the program has set switches of both generations
        with suppress(RuntimeError):
            named = torch.get_float32_matmul_precision()
        matmul.allow_tf32 = cudnn.allow_tf32 = allowed
        for switch in cuda:
            switch.fp32_precision = "tf32" if allowed else "ieee"
        for switch in () if allowed else _onednn_switches():
            switch.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before
            if named:
                torch.set_float32_matmul_precision(named)


@contextmanager
def _kept(switches: tuple[Any, ...]) -> Iterator[None]:
    """The new switches have their values again on exit. Their own "none" stands for the value of
    ``torch.backends.fp32_precision`` and reads as that value, so it is tried first."""
    before = [switch.fp32_precision for switch in switches]
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = "none"
            if switch.fp32_precision != value:
                switch.fp32_precision = value


def _onednn_switches() -> tuple[Any, ...]:
    onednn: Any = torch.backends.mkldnn
    return onednn.matmul, onednn.conv, onednn.rnn


@contextmanager
def custom_lists(changes: Mapping[str, str], device_type: str) -> Iterator[None]:
    """Autocast with some ops on another list: what if softmax ran in half?

        with custom_lists(parse("softmax=half,mm=fp32"), "cpu"):
            ...                       # autocast casts by its own lists, but for these ops

    Kernels for all overloads of an op are registered over autocast's own, after the templates of
    ATen/autocast_mode.h, and taken back on exit. Weights are cast anew at every call (autocast's
    cache cannot be reached from Python), which costs time and changes no number. Works on a CPU, on
    CUDA, and inside a rehearsal of CUDA's lists. The ops of ``changes`` run as their list says
    (half, fp32, widest, as it comes).

    Raises BadInput for an op that torch does not have.
    """
    if not changes:
        yield
        return
    plan = {
        _name(overload): _kernel(meaning, overload, device_type)
        for name, meaning in changes.items()
        for overload in _overloads(name)
    }
    library = registered(plan, _KEYS[device_type])
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call] # torch leaves it untyped


def registered(plan: Mapping[str, Op], key: str) -> Library:
    """A library of kernels by the names of aten ops, over what the dispatch key ``key`` had until
    it is destroyed."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call] # torch leaves it untyped
    with warnings.catch_warnings():
        # torch warns once a process that a kernel is overridden; overriding is what is meant here
        warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
        for op, kernel in plan.items():
            library.impl(op, kernel, key, allow_override=True)  # type: ignore[no-untyped-call] # as above
    return library


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


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if is_eligible(value, device_type) else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, device_type) for item in value]
    return value


def _dtype(meaning: str, values: list[Any], device_type: str) -> torch.dtype:
    if meaning == "half":
        return torch.get_autocast_dtype(device_type)
    if meaning == "fp32":
        return torch.float32
    dtypes = [t.dtype for t in _tensors(values) if is_eligible(t, device_type)]
    return max(dtypes, key=lambda d: _WIDTH.get(d, 1), default=torch.float32)


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(list(value))


def is_eligible(value: object, device_type: str) -> TypeGuard[Tensor]:
    """Whether autocast may cast this argument of an op: a floating-point tensor, not double, on its
    device."""
    return (
        isinstance(value, Tensor)
        and value.device.type == device_type
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )
