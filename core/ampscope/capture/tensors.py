"""The floating-point tensors in whatever a module returned: tensors, tuples, dicts, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
_NO_DISPATCH = Tensor.__torch_dispatch__  # of torch's own tensors and parameters
_LAYOUTS = (torch.strided, torch.sparse_coo)
MAX_DEPTH = 4  # outputs of Transformers models nest two deep (past key values: three)


def floating_tensors(value: object) -> list[Tensor]:
    """Every floating-point tensor in ``value``, in order, down to :data:`MAX_DEPTH`."""
    if isinstance(value, Tensor):  # nearly always, and called for every module of every step
        return [value] if _is_readable(value) else []
    return list(_search(value, 0))


def version(tensor: Tensor) -> int:
    """How often ``tensor`` was written to; inference tensors do not count, and say 0."""
    return 0 if tensor.is_inference() else tensor._version


def in_backward() -> bool:
    """Whether a backward pass runs: what runs inside it repeats a checkpointed forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def holds_numbers(tensor: Tensor) -> bool:
    """Whether there are values to look at, plainly or in a COO tensor. Not so on the meta device,
    in nested and compressed layouts (:func:`stored` has theirs), in fake tensors and other
    subclasses with a dispatch of their own; and the zeros without memory with which a forward-mode
    derivative begins end the process in native code when they are read."""
    if type(tensor).__torch_dispatch__ is not _NO_DISPATCH or tensor.layout not in _LAYOUTS:
        return False
    return not (tensor.is_meta or tensor.is_nested or tensor._is_zerotensor())


def stored(tensor: Tensor) -> Tensor:
    """The numbers in memory as a strided tensor, whatever the layout: a COO tensor's values after
    the sum over repeated indices, those of compressed and nested layouts, an mkldnn tensor's."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]  # absent from torch's stubs
        return tensor.to_dense()
    return tensor.values()


def plain(tensor: Tensor) -> Tensor:
    """The same numbers where torch has ops for them: the values of a sparse tensor, complex numbers
    as pairs, float8 as fp32."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        tensor = stored(tensor)
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj())
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _is_readable(tensor: Tensor) -> bool:
    """Floating-point numbers in memory. Inside torch.func's vmap and grad a tensor has none, and
    inside jit.trace a look at them would become part of the traced model."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    return holds_numbers(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _search(value: object, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if _is_readable(value):
            yield value
        return
    if depth == MAX_DEPTH or value is None or isinstance(value, str | bytes | int | float):
        return
    if isinstance(value, Mapping):
        parts: list[object] = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
    else:
        return
    for part in parts:
        yield from _search(part, depth + 1)
