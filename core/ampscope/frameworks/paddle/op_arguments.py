"""The tensors among an op's arguments and results: found, cast as AMP would, put in place."""

from __future__ import annotations

from typing import Any

import paddle

from ampscope.frameworks.paddle.op_names import FIRST_INPUT_ONLY
from ampscope.frameworks.paddle.rounding import MARK, rounded, rounded_gradient

Tensor: Any = paddle.Tensor
NAMES = {  # AMP leaves fp64 alone
    paddle.float32: "fp32",
    paddle.float16: "fp16",
    paddle.bfloat16: "bf16",
}


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
