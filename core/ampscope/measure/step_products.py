"""Record the products of one training step: every matrix product, convolution and attention, with
its arguments' shapes, its FLOPs, where in the step it ran, and what its kernels are called.

    with kernels, StepTrace(ModelMap(model), kernels) as trace:
        loss.backward()
    trace.found[0].call.dimensions(), trace.found[0].places

A convolution's backward op computes two products. It is run as two ops, one for each, which is
what its kernels do anyway, so that each has its own FLOPs, kernels and time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from ampscope.capture.model_map import Numbers
from ampscope.capture.op_place import OpPlace
from ampscope.formats import dtype_name
from ampscope.measure.product_calls import WEIGHT_GRADIENT, ProductCall

_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # absent from torch's registry
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
_MASK = 10  # position of output_mask in convolution_backward


class Kernels(Protocol):
    """Learns which kernels ran for which product."""

    def mark(self, number: int) -> AbstractContextManager[object]: ...


@dataclass(slots=True)
class Found:
    """One product of the step; equal ones are one."""

    call: ProductCall
    dtype: str  # computed in; "tf32" is fp32 tensors with TF32 switched on
    flops: int  # of one call
    moved_bytes: int  # likewise
    places: Counter[tuple[int, str]] = field(default_factory=Counter)  # (module, phase) -> calls


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step that was recorded."""

    names: dict[int, str]  # module -> path
    found: list[Found]
    kernels: dict[int, tuple[str, ...]]  # by a product's number
    source: str  # of the kernels' names


class StepTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook is untyped
    """Records while entered; :attr:`found` is in the order of first calls, and a product's number
    is its place there."""

    supports_higher_order_operators = True

    def __init__(self, names: Numbers, kernels: Kernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.found: list[Found] = []
        self.device = ""  # "cpu" | "cuda": where the first product ran
        self._numbers: dict[tuple[ProductCall, str], int] = {}
        self._place = OpPlace(names)
        self._kernels = kernels

    def __enter__(self) -> StepTrace:
        self._place.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, where)  # type: ignore[no-untyped-call]  # as above
        self._place.__exit__(kind, error, where)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
        if formula is None:
            return func(*args, **(kwargs or {}))
        if func is _aten.convolution_backward.default and all(args[_MASK][:2]):
            of_input = self._recorded(func, formula, _masked(args, (True, False, False)), {})
            of_weight = (False, True, args[_MASK][2])
            rest = self._recorded(func, formula, _masked(args, of_weight), {})
            return of_input[0], rest[1], rest[2]
        return self._recorded(func, formula, args, kwargs or {})

    def _recorded(
        self, func: Any, formula: Callable[..., int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = ProductCall.of(func, args, kwargs)
        dtype = _computed_in(call, args)
        number = self._numbers.setdefault((call, dtype), len(self.found))
        with self._kernels.mark(number):
            out = func(*args, **kwargs)
        if number == len(self.found):
            self.device = self.device or _device(args)
            flops = int(formula(*args, **kwargs, out_val=out))
            if call.part == WEIGHT_GRADIENT:
                # torch's formula takes every input channel with every output channel, and a
                # grouped convolution takes only those of one group with each other.
                flops //= call.groups
            self.found.append(Found(call, dtype, flops, moved_bytes(call, out)))
        self.found[number].places[self._place.now()] += 1
        return out


def moved_bytes(call: ProductCall, out: Any) -> int:
    """Every operand read once and every result written once."""
    read = sum(t.elements * t.dtype.itemsize for t in call.tensors())
    results = out if isinstance(out, tuple) else (out,)
    if call.part == WEIGHT_GRADIENT:  # the weights are an argument for their shape alone
        weight = call.args[2]
        read -= weight.elements * weight.dtype.itemsize
    elif call.part:  # and so is the input
        data = call.args[1]
        read -= data.elements * data.dtype.itemsize
    written = (r for r in results if isinstance(r, Tensor) and r.is_floating_point())
    return read + sum(r.numel() * r.dtype.itemsize for r in written)


def _device(args: tuple[Any, ...]) -> str:
    return next((a.device.type for a in args if isinstance(a, Tensor)), "")


def _masked(args: tuple[Any, ...], mask: tuple[bool, bool, bool]) -> tuple[Any, ...]:
    return (*args[:_MASK], list(mask), *args[_MASK + 1 :])


def _computed_in(call: ProductCall, args: tuple[Any, ...]) -> str:
    """The dtype of its first operand; fp32 is "tf32" where CUDA may round to that."""
    first = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
    if first is None:
        return "other"
    if first.dtype is torch.float32 and first.device.type == "cuda":
        backends: Any = torch.backends  # Any: the newer switches have no type hints
        switch = backends.cudnn.conv if "conv" in call.name else backends.cuda.matmul
        return "tf32" if switch.fp32_precision == "tf32" else "fp32"
    return dtype_name(first.dtype)
