"""Tensors without plain memory, as training code makes them: wrappers in the ways of torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Wrapper(Tensor):
    """A wrapper subclass: its own memory is none; ops run on the tensors inside."""

    names: tuple[str, ...] = ("_tensor",)

    @staticmethod
    def __new__(cls, *inner: Tensor, dtype: Any = None, requires_grad: bool = False) -> Wrapper:
        first = inner[0]
        return Tensor._make_wrapper_subclass(
            cls,
            first.shape,
            dtype=first.dtype if dtype is None else dtype,
            device=first.device,
            requires_grad=requires_grad,
        )

    def __init__(self, *inner: Tensor, **options: Any) -> None:
        for name, tensor in zip(self.names, inner, strict=True):
            setattr(self, name, tensor)

    def plainly(self) -> Tensor:
        """What it stands for."""
        return getattr(self, self.names[0])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.names), None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inside(value: Any) -> Any:
            return value.plainly() if isinstance(value, Wrapper) else value

        out = func(*tree_map(inside, args), **tree_map(inside, kwargs or {}))
        keeps = ("detach", "clone", "alias", "empty_like", "zeros_like", "ones_like")
        if func._overloadpacket._qualified_op_name.split("::")[1] in keeps:
            return cls.around(out)
        return args[0] if func._schema.is_mutable and isinstance(args[0], Wrapper) else out

    @classmethod
    def around(cls, out: Tensor) -> Any:
        return cls(out)


class Float8Weight(Wrapper):
    """As torchao's WeightWithDynamicFloat8CastTensor: a high-precision tensor in a wrapper."""


class Int8Weight(Wrapper):
    """As torchao's Int8QuantizedTrainingLinearWeight: whole numbers, and a scale for each row."""

    names = ("int_data", "scale")

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Any:
        return Wrapper.__new__(cls, data, dtype=scale.dtype)

    def plainly(self) -> Tensor:
        return self.int_data * self.scale[:, None]

    @classmethod
    def around(cls, out: Tensor) -> Any:
        scale = out.abs().amax(1) / 127
        return cls((out / scale[:, None]).round().to(torch.int8), scale)


class Opaque(Wrapper):
    """A wrapper without a protocol."""

    __tensor_flatten__ = None  # type: ignore[assignment]  # it has none


class Twins(Wrapper):
    """Two tensors of one shape: neither is what it stands for."""

    names = ("_a", "_b")

    @classmethod
    def around(cls, out: Tensor) -> Any:
        return cls(out, out.clone())


class Tagged(Tensor):
    """Memory of its own, and other functions."""
