"""Instrument: every op of a step below autocast, by module and phase, with dtypes and FLOPs.

Below autocast the casts that autocast inserted are ops like any other. The trace sees ops as the
dispatcher does, on any device, but for those of instruments (:mod:`ampscope.capture.own_ops`).

Speed: a step of a small GPT has 4,000 ops. One trip through a dispatch mode costs 3 to 4 us and
noting an op 2 us, so the trace does nothing per op that can be done once a step or once an op
kind, and when another mode executes the ops (Tensor Core arithmetic on a CPU) it calls that mode
itself instead of sending each op through the dispatcher a second time.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop, sdpa_flop

from ampscope.capture.failures import Failures
from ampscope.capture.model_map import ModuleNumbers
from ampscope.capture.op_place import OpPlace
from ampscope.numerics.formats import dtype_name
from ampscope.records import OpRecord

_aten = torch.ops.aten
_CAST_OPS = {id(_aten._to_copy.default)}


def _of_convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *more: Any, **_: Any) -> int:
    """The gradients of input and of weight take one multiplication each for every one of the
    forward pass, in any number of groups. (torch's own formula is up to ``groups`` times that.)"""
    transposed, mask = more[4], more[7]
    forward = conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed)
    return int(forward * (bool(mask[0]) + bool(mask[1])))


def _of_rnn(x: Tensor, weights: Iterable[Any]) -> int:
    """Of all layers and directions: each matrix meets every element of every sequence once. Gates
    and biases are no matmuls and do not count, as in torch's formulas."""
    sizes = (w.numel() for w in weights if isinstance(w, Tensor) and w.dim() == 2)
    return 2 * x.shape[:-1].numel() * sum(sizes)


def _of_rnn_layer(x: Tensor, *args: Any, **_: Any) -> int:
    return _of_rnn(x, args[:2])


def _of_rnn_layer_backward(x: Tensor, *args: Any, **_: Any) -> int:
    return 2 * _of_rnn(x, args[:2])


def _of_cudnn_rnn(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return _of_rnn(x, weights)


def _of_cudnn_rnn_backward(x: Tensor, weights: Sequence[Tensor], *args: Any, **_: Any) -> int:
    """Data always; weights where the mask asks for them."""
    return _of_rnn(x, weights) * (1 + bool(args[-1][3]))


def _of_whole_rnn(x: Tensor, *args: Any, **_: Any) -> int:
    """lstm.input(x, hx, params, …), lstm.data(x, batch_sizes, hx, params, …) and their kin."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    return _of_rnn(x, lists[-1] if lists else ())


def _no_matmul(*_: Any, **__: Any) -> int:
    """Gates of a recurrent cell whose matmuls are ops of their own."""
    return 0


def _of_attention(formula: Callable[..., int]) -> Callable[..., int]:
    """``formula`` with as many heads of keys and values as of queries: that is what the kernels of
    grouped-query attention compute, and torch 2.11 raises AssertionError for."""

    def of(*args: Any, **kwargs: Any) -> int:
        shapes = [tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in args]
        of_heads = [isinstance(s, tuple) and len(s) == 4 for s in shapes]
        heads = max((s[1] for s, has in zip(shapes, of_heads, strict=True) if has), default=0)
        same = [
            (s[0], heads, *s[2:]) if has else s for s, has in zip(shapes, of_heads, strict=True)
        ]
        return formula(*same, **kwargs)

    return of


ATTENTION_FORMULAS: dict[Any, Callable[..., int]] = {
    packet: _of_attention(formula)
    for packet, formula in {
        **flop_registry,
        # absent from torch's registry
        _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    }.items()
    if "scaled_dot_product" in str(packet)
}
_OWN_FORMULAS: dict[Any, Callable[..., int]] = {  # absent from torch's registry, or wrong there
    **ATTENTION_FORMULAS,
    _aten.convolution_backward: _of_convolution_backward,
    _aten.mkldnn_rnn_layer: _of_rnn_layer,
    _aten.mkldnn_rnn_layer_backward: _of_rnn_layer_backward,
    _aten._cudnn_rnn: _of_cudnn_rnn,
    _aten._cudnn_rnn_backward: _of_cudnn_rnn_backward,
    _aten.miopen_rnn: _of_cudnn_rnn,
    _aten.miopen_rnn_backward: _of_cudnn_rnn_backward,
    **dict.fromkeys((_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu), _of_whole_rnn),
    **dict.fromkeys(
        (
            _aten._thnn_fused_lstm_cell,
            _aten._thnn_fused_lstm_cell_backward_impl,
            _aten._thnn_fused_gru_cell,
            _aten._thnn_fused_gru_cell_backward,
        ),
        _no_matmul,
    ),
}
_Dtypes = tuple[torch.dtype, ...]
_Key = tuple[int, tuple[int, str], _Dtypes, _Dtypes, int]  # op, place, inputs, outputs, FLOPs


class OpTrace:
    """Counts ops while entered, one step a time; :meth:`take` returns the step's ops.

    ``executes`` is the mode that runs the ops, for example `TensorCoreMode`. It is then active
    while the trace is, and must not be entered besides.
    """

    def __init__(
        self,
        names: ModuleNumbers,
        executes: TorchDispatchMode | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.failures = failures or Failures()
        self.place = OpPlace(names)
        self.elapsed_s = 0.0
        self._mode = _Intercept(self.record, executes)
        self._counts: dict[_Key, int] = {}
        self._ops: dict[int, Any] = {}  # by id, which is faster than their own hash; kept alive
        self._flops = Flops(self.failures)
        self._known: dict[frozenset[tuple[_Key, int]], int] = {}

    def __enter__(self) -> OpTrace:
        self._counts.clear()
        self.place.__enter__()
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        self.place.__exit__(*error)
        self.elapsed_s += self._mode.elapsed_s
        self._mode.elapsed_s = 0.0

    def take(self) -> tuple[int, list[OpRecord]]:
        """(id of the step's op set, its ops). Equal sets have equal ids; the ops of a set that was
        taken before are left out."""
        mark = frozenset(self._counts.items())
        known = self._known.get(mark)
        if known is not None:
            return known, []
        records = self._records()
        digest = hashlib.blake2b(repr(records).encode(), digest_size=6).digest()
        number = int.from_bytes(digest, "big")
        taken_before = number in self._known.values()
        self._known[mark] = number
        return number, [] if taken_before else records

    def forget(self) -> None:
        """Begin anew, for those who call :meth:`record` themselves and never enter the trace."""
        self._counts.clear()

    def record(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Note one call of ``func``. One that cannot be noted is no error of the step."""
        try:
            self._note(func, args, kwargs, out)
        except Exception as error:
            self.failures.add("some ops", error)

    def _note(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        number = id(func)
        if number not in self._ops:
            self._ops[number] = func
        flops = self._flops.of(func, args, kwargs, out)
        key = (number, self.place.now(), _dtypes(args, kwargs), _dtypes((out,), None), flops)
        self._counts[key] = self._counts.get(key, 0) + 1

    def _records(self) -> list[OpRecord]:
        merged: dict[tuple[int, str, str, str, str, bool], tuple[int, int]] = {}
        for (number, place, inputs, outputs, flops), count in self._counts.items():
            read, written = _names(inputs), _names(outputs)
            if not read and not written:
                continue  # integers and booleans alone
            is_cast = number in _CAST_OPS and read != written
            key = (*place, _op_name(self._ops[number]), read, written, is_cast)
            calls, total = merged.get(key, (0, 0))
            merged[key] = (calls + count, total + flops * count)
        return [
            OpRecord(*key[:5], count=calls, flops=total, is_cast=key[5])
            for key, (calls, total) in sorted(merged.items())
        ]


class Flops:
    """FLOPs of single calls. torch's formulas take 15 us; the shapes that they depend on repeat
    every step. A formula that does not know a form of its op is noted in ``failures``."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self._formulas: dict[int, Callable[..., int] | None] = {}
        self._kept: list[Any] = []  # an id is unique only while its op lives
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> int:
        """0 for an op without a formula: only matmuls, convolutions and attention have one."""
        number = id(func)
        if number not in self._formulas:
            packet = getattr(func, "_overloadpacket", None)
            self._formulas[number] = _OWN_FORMULAS.get(packet) or flop_registry.get(packet)
            self._kept.append(func)
        formula = self._formulas[number]
        if formula is None:
            return 0
        key = (number, *map(_shape, args), *map(_shape, (kwargs or {}).values()))
        flops = self._known.get(key)
        if flops is None:
            try:
                flops = int(formula(*args, **(kwargs or {}), out_val=out))
            except Exception as error:  # a form of the op that the formula does not know
                self.failures.add("the FLOPs of some ops", error)
                flops = 0
            self._known[key] = flops
        return flops


class _Intercept(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook is untyped
    """Runs each op and hands it to ``record``, which owns the data."""

    supports_higher_order_operators = True  # a model with flex_attention must run as without

    def __init__(self, record: Callable[..., None], executes: TorchDispatchMode | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.elapsed_s = 0.0
        self._record = record
        self._execute: Callable[..., Any] | None = None
        if executes is not None:
            # Without torch's wrapper of the handler: here it runs inside another mode's handler.
            handler = inspect.unwrap(type(executes).__torch_dispatch__)
            self._execute = MethodType(handler, executes)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper that keeps torch.compile out of each call: it costs 1 us an op."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._execute is not None:
            out = self._execute(func, types, args, kwargs)
        else:
            out = func(*args, **kwargs) if kwargs else func(*args)
        started = time.perf_counter()
        self._record(func, args, kwargs, out)
        self.elapsed_s += time.perf_counter() - started
        return out


def _dtypes(values: Iterable[Any], more: Mapping[str, Any] | None) -> _Dtypes:
    """Dtypes of the tensors in arguments or results; a list (cat, foreach) gives each dtype once,
    because it may be hundreds long."""
    found: list[torch.dtype] = []
    for value in (*values, *more.values()) if more else values:
        if isinstance(value, Tensor):
            found.append(value.dtype)
        elif isinstance(value, tuple):
            found += [part.dtype for part in value if isinstance(part, Tensor)]
        elif isinstance(value, list):
            found += dict.fromkeys(part.dtype for part in value if isinstance(part, Tensor))
    return tuple(found)


def _names(dtypes: _Dtypes) -> str:
    """ "fp16,fp16,fp32"; integers and booleans are left out."""
    return ",".join(dtype_name(d) for d in dtypes if d.is_floating_point)


def _op_name(func: Any) -> str:
    """ "aten.addmm"; a higher-order operator has no overloads and one name."""
    if isinstance(func, torch._ops.OpOverload):
        return f"{func.namespace}.{func._opname}"
    return f"higher_order.{func.name()}"


def _shape(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shape, value)) if isinstance(value, list | tuple) else value
