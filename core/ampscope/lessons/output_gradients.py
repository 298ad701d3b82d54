"""The gradients of all module outputs of one backward pass, in the dtype in which they flow.

with output_gradients(model) as found:
    loss(model, batch).backward()
found["blocks.0.attention.q", 0]        # of its first call
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from torch import Tensor, nn

from ampscope.capture.exponent_count import count_into
from ampscope.capture.tensors import floating_tensors
from ampscope.exponents import RAW_LEN, Raw

Key = tuple[str, int]  # module, number of its call
Gradients = dict[Key, Tensor]


@contextmanager
def output_gradients(model: nn.Module) -> Iterator[Gradients]:
    """Of modules without children: a container hands on what its last child put out."""
    found: Gradients = {}
    calls: dict[str, int] = {}

    def keep(key: Key, gradient: Tensor) -> None:
        found[key] = gradient.detach().clone()

    def see(name: str, module: nn.Module, inputs: object, output: object) -> None:
        for tensor in floating_tensors(output):
            if tensor.requires_grad:
                key = name, calls.setdefault(name, 0)
                calls[name] += 1
                tensor.register_hook(partial(keep, key))  # type: ignore[no-untyped-call]  # torch's

    handles = [
        module.register_forward_hook(partial(see, name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def exponents_of(tensors: Iterator[Tensor] | list[Tensor]) -> Raw:
    """One raw row of all elements."""
    row = np.zeros(RAW_LEN, np.int64)
    for tensor in tensors:
        count_into(tensor.detach(), row)
    return row
