"""fp16 and bf16 on a CPU, where Paddle's auto_cast does nothing: every op rounds as a GPU would.

Each function of ``paddle._C_ops``, each name by which Paddle has imported one, and each operator of
Tensor is replaced by one that decides by Paddle's own lists in which dtype a GPU would run the op
(:mod:`regions`), rounds inputs and outputs to it, and computes in fp32 in between: half in, fp32
accumulation, half out, as Tensor Cores do. A tensor that would be half on a GPU is an fp32 tensor
that carries a mark.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from ampscope.frameworks.paddle.op_arguments import (
    NAMES,
    Tensor,
    any_marked,
    cast_to,
    inputs_of,
    marked,
    swapped,
)
from ampscope.frameworks.paddle.op_names import (
    FIRST_INPUT_ONLY,
    MOVING,
    OPERATORS,
    listed_name,
    operator_name,
)
from ampscope.frameworks.paddle.op_watch import OpRun
from ampscope.frameworks.paddle.regions import OpenRegion, dtype_of_op
from ampscope.frameworks.paddle.rounding import (
    MARK,
    round_memory,
    rounded,
    rounded_gradient,
)
from ampscope.frameworks.paddle.values import memory

_FP32, _FP16, _BF16 = paddle.float32, paddle.float16, paddle.bfloat16
_TARGETS = {_FP16: "fp16", _BF16: "bf16", "float16": "fp16", "bfloat16": "bf16"}
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
        replaced = list(self._replace_functions()) + list(self._replace_methods())
        try:
            yield self
        finally:
            for owner, name, original in reversed(replaced):
                setattr(owner, name, original)

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
        mark, target = getattr(tensor, MARK, None), _TARGETS.get(dtype)
        if target is not None and tensor.dtype == _FP32:
            return rounded(tensor, target)
        if target is not None:
            return rounded(function(tensor, _FP32), target)
        if mark is not None and dtype in (_FP32, "float32"):
            return rounded_gradient(tensor, mark)
        return function(tensor, dtype)

    def _replace_functions(self) -> Iterator[tuple[Any, str, Any]]:
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
                        setattr(module, name, replacements[id(value)])
                        yield module, name, value

    def _replacement(self, name: str, function: Callable[..., Any]) -> Any:
        if name == "cast":
            return functools.wraps(function)(lambda x, dtype, *rest: self.cast(function, x, dtype))
        if name in _SKIPPED or name.startswith("sparse") or name.endswith(_SKIPPED_ENDINGS):
            return None
        op, run = listed_name(name), self.run
        if name.endswith("_") and not name.startswith("_"):
            run = self.run_in_place
        return functools.wraps(function)(lambda *args, **kwargs: run(function, op, args, kwargs))

    def _replace_methods(self) -> Iterator[tuple[Any, str, Any]]:
        for method in OPERATORS:
            original = getattr(Tensor, method)
            setattr(Tensor, method, self._method(method, original))
            yield Tensor, method, original

    def _method(self, method: str, original: Callable[..., Any]) -> Any:
        number, tensor = (operator_name(method, with_number=n) for n in (True, False))

        def operate(left: Any, *others: Any) -> Any:
            op = tensor if others and isinstance(others[0], Tensor) else number
            return self.run(original, op, (left, *others), {})

        return functools.wraps(original)(operate)


_OWNERS = ("paddle.base.libpaddle.eager.ops", "paddle.base.libpaddle.pir.ops")
