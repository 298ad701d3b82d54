"""fp16 and bf16 on a CPU, where Paddle's auto_cast does nothing: every op rounds as a GPU would.

Each function of ``paddle._C_ops``, each name by which Paddle has imported one, and each operator of
Tensor is replaced by one that decides by Paddle's own lists in which dtype a GPU would run the op
(:func:`dtype_of_op`), rounds inputs and outputs to it, and computes in fp32 in between: half in,
fp32 accumulation, half out, as Tensor Cores do. A tensor that would be half on a GPU is an fp32
tensor that carries a mark.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from ampscope.ext.frameworks.paddle.op_names import (
    FIRST_INPUT_ONLY,
    MOVING,
    OPERATORS,
    listed_name,
    operator_name,
)
from ampscope.ext.frameworks.paddle.regions import OpenRegion, dtype_of_op
from ampscope.ext.frameworks.paddle.rounding import MARK, round_memory, rounded, rounded_gradient
from ampscope.ext.frameworks.paddle.seen_ops import OpRun
from ampscope.ext.frameworks.paddle.values import memory
from ampscope.patches import Patches

Tensor: Any = paddle.Tensor
NAMES = {  # AMP leaves fp64 alone
    paddle.float32: "fp32",
    paddle.float16: "fp16",
    paddle.bfloat16: "bf16",
}
_FP32, _FP16, _BF16 = paddle.float32, paddle.float16, paddle.bfloat16
TARGETS = {_FP16: "fp16", _BF16: "bf16", "float16": "fp16", "bfloat16": "bf16"}
_SKIPPED_ENDINGS = ("_grad", "_grad_")
# Optimizers and the scaler work on the numbers as they are; `cast` has a function of its own.
_SKIPPED = frozenset((
    "adadelta_", "adagrad_", "adam_", "adamax_", "adamw_", "asgd_", "average_accumulates_",
    "cast", "cast_", "fused_adam_", "check_finite_and_unscale_", "decayed_adagrad", "dpsgd",
    "ftrl", "lamb_", "lars_momentum_", "merged_adam_", "merged_momentum_", "momentum_", "nadam_",
    "radam_", "rmsprop_", "rprop_", "sgd_", "update_loss_scaling_", "assign_value_", "share_data",
    "share_var", "print", "isfinite", "isinf", "isnan", "shape", "shape64",
))  # fmt: skip

OpSeen = Callable[[OpRun], None]


def _instead(value: Any, original: Any) -> Any:
    """What stands in the place of ``original`` while an emulation is active."""
    return value


class Emulation:
    """Replaces ops inside ``with``. ``fp32_depth`` above zero: everything in fp32, whatever the
    region (layers that a setting keeps in fp32). ``op_seen`` hears of every op that ran."""

    def __init__(self, region: OpenRegion) -> None:
        self.region = region
        self.op_seen: OpSeen | None = None
        self.fp32_depth = 0
        self.halves: set[str] = set()  # dtypes of ops that ran in half

    @contextmanager
    def active(self) -> Iterator[Emulation]:
        """Replace the ops; everything is put back."""
        with Patches() as patches:
            for owner, name, value in [*self._functions(), *self._methods()]:
                patches.replace(owner, name, functools.partial(_instead, value))
            yield self

    def run(self, function: Callable[..., Any], op: str, args: Any, kwargs: Any) -> Any:
        """Run one op as a GPU would."""
        found = inputs_of(args, kwargs)
        region = self.region.now()
        if not found or (region is None and self.op_seen is None and not any_marked(found)):
            return function(*args, **kwargs)
        dtypes = [getattr(t, MARK, None) or NAMES[t.dtype] for t in found]
        target = "fp32" if self.fp32_depth else dtype_of_op(region, op, dtypes)
        if target == "fp32" and "fp16" not in dtypes and "bf16" not in dtypes:
            result = function(*args, **kwargs)
        else:
            result = self._rounded(function, op, target, found, dtypes, (args, kwargs))
        if self.op_seen is not None:
            plain = functools.partial(function, *args, **kwargs)
            self.op_seen(OpRun(op, target, found, dtypes, result, plain))
        return result

    def _rounded(
        self, function: Any, op: str, target: str, found: list[Any], dtypes: list[str], given: Any
    ) -> Any:
        args, kwargs = given
        moves = op in MOVING and all(dtype == target for dtype in dtypes)
        if not moves:
            only = found[:1] if op in FIRST_INPUT_ONLY else found
            cast = {id(t): cast_to(t, d, target) for t, d in zip(only, dtypes, strict=False)}
            args = [swapped(a, cast) for a in args]
            kwargs = {k: swapped(v, cast) for k, v in kwargs.items()}
        if target != "fp32":  # a layer may add an fp32 bias at its end, and put out fp32
            self.halves.add(target)
        return marked(function(*args, **kwargs), op, target, moves=moves)

    def run_in_place(self, function: Callable[..., Any], op: str, args: Any, kwargs: Any) -> Any:
        """An op that overwrites its first argument, whose dtype it therefore keeps."""
        found = inputs_of(args, kwargs) if self.op_seen is not None else []
        dtypes = [getattr(t, MARK, None) or NAMES[t.dtype] for t in found]
        result = function(*args, **kwargs)
        if found and self.op_seen is not None:
            self.op_seen(OpRun(op, dtypes[0], found[:1], dtypes[:1], result, lambda: None))
        half = getattr(args[0], MARK, None) if args else None
        if half is not None and op not in MOVING:
            numbers = memory(args[0])
            if numbers is not None:
                round_memory(numbers, half)
        return result

    def cast(self, function: Callable[..., Any], tensor: Any, dtype: Any) -> Any:
        """A cast that the script asks for: to half it rounds and marks, from half it rounds the
        gradient."""
        mark, target = getattr(tensor, MARK, None), TARGETS.get(dtype)
        if target is not None and tensor.dtype == _FP32:
            return rounded(tensor, target)
        if target is not None:
            return rounded(function(tensor, _FP32), target)
        if mark is not None and dtype in (_FP32, "float32"):
            return rounded_gradient(tensor, mark)
        return function(tensor, dtype)

    def _functions(self) -> Iterator[tuple[Any, str, Any]]:
        """Modules, names there, and what is to stand there: wherever Paddle has bound an op."""
        table: Any = paddle._C_ops
        replacements: dict[int, Any] = {}
        for name, function in list(vars(table).items()):
            if isinstance(function, types.BuiltinFunctionType):
                made = self._replacement(name, function)
                if made is not None:
                    replacements[id(function)] = made
        for key, module in list(sys.modules.items()):
            # By key: paddle._C_ops has taken over the __name__ of the C++ module too.
            if key.split(".")[0] == "paddle" and key not in _OWNERS and module is not None:
                for name, value in list(vars(module).items()):
                    if id(value) in replacements:
                        yield module, name, replacements[id(value)]

    def _replacement(self, name: str, function: Callable[..., Any]) -> Any:
        if name == "cast":
            return functools.wraps(function)(lambda x, dtype, *rest: self.cast(function, x, dtype))
        if name in _SKIPPED or name.startswith("sparse") or name.endswith(_SKIPPED_ENDINGS):
            return None
        op, run = listed_name(name), self.run
        if name.endswith("_") and not name.startswith("_"):
            run = self.run_in_place
        return functools.wraps(function)(lambda *args, **kwargs: run(function, op, args, kwargs))

    def _methods(self) -> Iterator[tuple[Any, str, Any]]:
        """The class of tensors, names of its operators, and what is to stand there."""
        for method in OPERATORS:
            yield Tensor, method, self._method(method, getattr(Tensor, method))

    def _method(self, method: str, original: Callable[..., Any]) -> Any:
        number, tensor = (operator_name(method, with_number=n) for n in (True, False))

        def operate(left: Any, *others: Any) -> Any:
            op = tensor if others and isinstance(others[0], Tensor) else number
            return self.run(original, op, (left, *others), {})

        return functools.wraps(original)(operate)


_OWNERS = ("paddle.base.libpaddle.eager.ops", "paddle.base.libpaddle.pir.ops")


def inputs_of(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Tensors that AMP would look at, in order."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if value.dtype in NAMES:
                found.append(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            found += [t for t in value if isinstance(t, Tensor) and t.dtype in NAMES]
    return found


def any_marked(tensors: list[Any]) -> bool:
    return any(hasattr(tensor, MARK) for tensor in tensors)


def cast_to(tensor: Any, dtype: str, target: str) -> Any:
    """``tensor`` as an op that computes in ``target`` gets it."""
    if target != "fp32":
        known = dtype == target and tensor.stop_gradient
        return tensor if known else rounded(tensor, target)
    return tensor if dtype == "fp32" else rounded_gradient(tensor, dtype)


def swapped(value: Any, cast: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return cast.get(id(value), value)
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return [cast.get(id(part), part) for part in value]
    return value


def marked(result: Any, op: str, target: str, *, moves: bool) -> Any:
    """The op's output, rounded and marked where it is half. Of a norm the first output alone: its
    statistics stay fp32."""
    if target == "fp32":
        return result
    if isinstance(result, Tensor):
        if result.dtype != paddle.float32:
            return result
        if moves:
            setattr(result, MARK, target)
            return result
        return rounded(result, target)
    if isinstance(result, tuple | list):
        first = 1 if op in FIRST_INPUT_ONLY else len(result)
        parts = [marked(p, op, target, moves=moves) for p in result[:first]]
        return type(result)([*parts, *result[first:]])
    return result
