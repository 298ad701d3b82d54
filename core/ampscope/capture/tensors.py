"""The floating-point tensors in whatever a module returned: tensors, tuples, dicts, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

MAX_DEPTH = 4  # outputs of Transformers models nest two deep (past key values: three)


def floating_tensors(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Every floating-point tensor in ``value``, in order, down to :data:`MAX_DEPTH`."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout == torch.strided:
            yield value
        return
    if depth == MAX_DEPTH or value is None or isinstance(value, str | bytes | int | float):
        return
    if isinstance(value, Mapping):
        parts: object = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
    else:
        return
    for part in parts:  # type: ignore[attr-defined]  # each branch above made it iterable
        yield from floating_tensors(part, depth + 1)
