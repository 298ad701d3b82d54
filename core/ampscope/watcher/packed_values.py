"""Arguments of a model as JSON and tensors, and back: no pickle, and nothing that can run code.

    >>> tensors = {}
    >>> packed((torch.ones(2), {"mask": None}), "args", tensors)
    {'tuple': [{'tensor': 'args.0', 'grad': False}, {'dict': [['mask', {'value': None}]]}]}

Tensors, numbers, texts, None, and tuples, lists and dicts of these are kept; named tuples as plain
tuples, dict-like objects as dicts. Anything else is named in the text, and unpacks as
:class:`NotKept`, on which a replay gives up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.tensors import has_own_memory
from ampscope.masks import masked_value
from ampscope.secret_names import is_secret

Tensors = dict[str, Tensor]
MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class NotKept:
    """Stands for an argument that a capsule cannot hold."""

    type: str


def packed(value: object, name: str, tensors: Tensors, depth: int = 0) -> dict[str, Any]:
    """``value`` as JSON; its tensors are added to ``tensors`` under names that begin with
    ``name``."""
    if isinstance(value, Tensor) and value.layout is torch.strided and has_own_memory(value):
        tensors[name] = value  # of a wrapper or another layout the numbers alone would say little
        return {"tensor": name, "grad": value.requires_grad}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if depth == MAX_DEPTH or not isinstance(value, Mapping | list | tuple):
        return {"not kept": type(value).__name__}
    pairs = list(value.items() if isinstance(value, Mapping) else enumerate(value))
    parts = [
        (key, packed(part, f"{name}.{place}", tensors, depth + 1))
        for place, (key, part) in enumerate(pairs)
        if isinstance(key, str | int)
    ]
    if isinstance(value, Mapping):
        return {"dict": [list(pair) for pair in parts]}
    return {"list" if isinstance(value, list) else "tuple": [part for _, part in parts]}


def without_secrets(tree: dict[str, Any], called: str = "") -> dict[str, Any]:
    """What :func:`packed` gave, as a file may hold it: a text with a secret, by what it or what
    holds it is ``called``, is not kept, since a model that ran with another text would say nothing
    of the step; the others are what a model may need."""
    ((kind, content),) = ((k, v) for k, v in tree.items() if k != "grad")
    if kind == "value" and isinstance(content, str):
        return tree if masked_value(called, content) == content else {"not kept": "secret text"}
    if kind == "dict":
        return {
            kind: [
                [key, without_secrets(part, str(key) if is_secret(str(key)) else called)]
                for key, part in content
            ]
        }
    if kind in ("list", "tuple"):
        return {kind: [without_secrets(part, called) for part in content]}
    return tree


def unpacked(tree: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of :func:`packed`. Raises KeyError or ValueError for what is not its result."""
    ((kind, content),) = ((k, v) for k, v in tree.items() if k != "grad")
    if kind == "tensor":
        tensor = tensors[content].detach()
        return tensor.requires_grad_() if tree.get("grad") is True else tensor
    if kind == "value":
        return content
    if kind == "dict":
        return {key: unpacked(part, tensors) for key, part in content}
    if kind == "list":
        return [unpacked(part, tensors) for part in content]
    if kind == "tuple":
        return tuple(unpacked(part, tensors) for part in content)
    if kind == "dtype":
        dtype = getattr(torch, content)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{content!r} is no dtype")
        return dtype
    if kind == "device":
        return torch.device(content)
    if kind == "not kept":
        return NotKept(str(content))
    raise ValueError(f"{kind!r} is no part of a capsule")


def first_not_kept(value: object) -> str:
    """The type of the first argument that is not in the capsule; "" when all are."""
    if isinstance(value, NotKept):
        return value.type
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return next((found for part in parts if (found := first_not_kept(part))), "")  # type: ignore[attr-defined]  # a container
    return ""
