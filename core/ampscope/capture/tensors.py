"""Which tensors can be read, and how: the one door that every tensor passes before it is looked at.

Training hands out more than plain memory: meta, fake and functional tensors, wrapper subclasses
(DTensor, torchao's weights), sparse and nested layouts, quantized numbers, storages that FSDP has
resized to nothing. Reading those through an address ends the process. So the door looks at what a
tensor *is* before anything touches its memory::

    is_dense(tensor)     whether the tensor itself is that already, as nearly always
    opened(tensor)       the numbers as a plain strided tensor, or None
    unreadable(tensor)   why there are none; "" when there are
    numbers(tensor)      as opened; raises Unreadable, which says why
    plain(tensor)        as numbers, 8-bit floats as fp32
    floating_tensors(x)  those of a module's output (tensors, tuples, dicts, dataclasses)
    is_capturing()       whether no tensor may be read now, since a CUDA graph is recorded
    is_traced()          whether what runs now is no training, but makes a graph
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import _symbolic_trace
from torch.nn.parameter import Buffer, Parameter, UninitializedBuffer, UninitializedParameter

from ampscope.capture.own_ops import own_ops

HALF = (torch.float16, torch.bfloat16)
AUTOCAST_KINDS = ("cuda", "cpu", "mps", "xpu")  # of devices that have autocast
PLAIN = frozenset({Tensor, Parameter, Buffer})  # torch's own: the object is the memory
_NO_DISPATCH = Tensor.__torch_dispatch__  # of torch's own tensors and parameters
_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)
_MKLDNN = torch._mkldnn  # type: ignore[attr-defined]  # absent from torch's stubs
_PACKED = frozenset({getattr(torch, "float4_e2m1fn_x2", None)})
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_is_functional = torch._is_functional_tensor
_WIDE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# torch's dispatch keys say all that the door asks of torch's own tensors, but for memory and dtype:
# meta, functorch, functional, zero, nested, sparse, quantized, conjugate and negative have keys.
_keys = torch._C._dispatch_keys
SMALL = 1 << 14  # elements of a tensor on a CPU that is looked at together with others
_dense_keys: set[int] = set()  # of tensors that passed the door as they are


class Unreadable(TypeError):  # noqa: N818  # says what the tensor is
    """A tensor whose numbers cannot be read; the message says why."""


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


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph. Whatever is launched then becomes part of
    the graph, and a wait for a number ends the capture: no tensor may be looked at.

    Cheap, and never the first to initialise CUDA.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return False
    return torch.cuda.is_current_stream_capturing()


def is_traced() -> bool:
    """Whether what runs now only makes a graph: for torch.compile, torch.fx or make_fx. Instruments
    look away. torch.compile, which reads this very function, comes to a constant first."""
    return torch.compiler.is_compiling() or is_fx_tracing()


def is_fx_tracing() -> bool:
    """Whether torch.fx runs a model on stand-ins for tensors, to make a graph of it. torch's own
    function of this name logs a warning at its first call."""
    return bool(_symbolic_trace._is_fx_tracing_flag)


def unreadable(tensor: Tensor) -> str:
    """Why there are no numbers to read in ``tensor``; "" when there are. Takes no address."""
    return _inside(tensor)[1]


def holds_numbers(tensor: Tensor) -> bool:
    """Whether :func:`opened` gives the numbers."""
    return not _inside(tensor)[1]


def opened(tensor: Tensor) -> Tensor | None:
    """The numbers of ``tensor`` as a plain strided tensor that torch's ops and the counters may
    read; None when :func:`unreadable` has a reason.

    Every tensor that an instrument reads passes here. A DTensor is opened as the part that this
    process holds, another wrapper as the one tensor inside that has its shape and dtype, a sparse
    or nested tensor as its values, complex numbers as pairs. The dtype stays, or is that of the
    pairs. What it returns shares the memory of ``tensor`` where no conversion is needed, and
    autograd may know it: read it under `torch.no_grad`.
    """
    inner, reason = _inside(tensor)
    return None if reason else _strided(inner)


def numbers(tensor: Tensor) -> Tensor:
    """As :func:`opened`.

    Raises:
        Unreadable: with the reason.
    """
    inner, reason = _inside(tensor)
    if reason:
        raise Unreadable(f"A tensor cannot be read: {reason}.")
    return _strided(inner)


def plain(tensor: Tensor) -> Tensor:
    """As :func:`numbers`, with 8-bit floats as fp32, for which torch has few ops."""
    values = numbers(tensor)
    if values.itemsize == 1 and values.is_floating_point():
        return values.detach().float()
    return values


def readable(tensor: Tensor) -> Tensor | None:
    """As :func:`plain`, None where that raises; without autograd's knowledge. It may be ``tensor``
    itself."""
    inner, reason = _inside(tensor)
    if reason:
        return None
    values = _strided(inner)
    if values.requires_grad:
        values = values.detach()
    return values.float() if values.itemsize == 1 and values.is_floating_point() else values


def floats(tensor: Tensor) -> Tensor | None:
    """As :func:`readable`, and None for whole numbers."""
    if is_dense(tensor):
        return tensor.detach() if tensor.requires_grad else tensor
    values = readable(tensor)
    return values if values is not None and values.is_floating_point() else None


def is_dense(tensor: Tensor) -> bool:
    """Whether ``tensor`` is its own numbers: torch's own class, strided, 16 bits or more, with
    memory. The short way through the door, at half the price, for what comes at every step."""
    if type(tensor) not in PLAIN or tensor.dtype not in _WIDE:
        return False
    keys = _keys(tensor).raw_repr()
    if keys in _dense_keys:
        return _has_memory(tensor)
    inner, reason = _inside(tensor)
    if reason or tensor.layout is not torch.strided or _strided(inner) is not tensor:
        return False
    _dense_keys.add(keys)
    return True


def all_finite(tensor: Tensor) -> bool:
    """Whether no NaN and no infinity can be read in ``tensor``.

    A sum is finite only where every term is, and takes one pass without a copy: 0.1 ns an element
    on a CPU, where isfinite takes 2.5. Finite terms may have an infinite sum: then the least and
    the largest decide (0.3 ns), which a NaN replaces.
    """
    with own_ops():
        values = floats(tensor)
        if values is None:
            return True
        total = values.sum(dtype=torch.float32) if values.dtype in HALF else values.sum()
        if math.isfinite(total.item()):
            return True
        return all(math.isfinite(end.item()) for end in torch.aminmax(values))


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """:func:`all_finite` of each tensor. On a device with one wait for all; on a CPU, where a call
    costs more than a few numbers, with few calls for all small tensors."""
    if len(tensors) < 2:
        return [all_finite(tensor) for tensor in tensors]
    finite = [True] * len(tensors)
    with own_ops():
        together: list[tuple[int, Tensor]] = []
        for place, tensor in enumerate(tensors):
            if tensor.is_cpu and tensor.numel() > SMALL:
                finite[place] = all_finite(tensor)
            elif (values := floats(tensor)) is not None:
                together.append((place, values))
        largest = fetch(largest_of([values for _, values in together]))
        for (place, _), value in zip(together, largest, strict=True):
            finite[place] = math.isfinite(value)
    return finite


def largest_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude in each, 0 in an empty one, as 0-dimensional tensors; not finite where
    one element is not. On a device one launch serves all tensors of a dtype."""
    return norms_of(tensors, math.inf)


def norms_of(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """A norm of each floating-point tensor, computed in ``dtype``, as 0-dimensional tensors."""
    found = [t.new_zeros((), dtype=dtype) if not t.numel() else t for t in tensors]
    for places in _alike(found):
        norms = torch._foreach_norm([found[place] for place in places], order, dtype=dtype)
        for place, norm in zip(places, norms, strict=True):
            found[place] = norm
    return found


def fetch(numbers: Sequence[Tensor]) -> list[float]:
    """The values of 0-dimensional tensors of real numbers, with one wait for each device that they
    are on. Whole numbers are exact up to 2^53."""
    if all(number.is_cpu for number in numbers):
        return [float(number) for number in numbers]
    found = [0.0] * len(numbers)
    waiting: dict[torch.device, list[tuple[list[int], Tensor]]] = defaultdict(list)
    for places in _alike(numbers):
        stacked = torch.stack([numbers[place] for place in places]).double()
        waiting[stacked.device].append((places, stacked))
    for parts in waiting.values():
        values = torch.cat([stacked for _, stacked in parts]).tolist()
        for place, value in zip((n for places, _ in parts for n in places), values, strict=True):
            found[place] = value
    return found


def _alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of the tensors of each device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        found[tensor.device, tensor.dtype].append(place)
    return list(found.values())


def has_own_memory(tensor: Tensor) -> bool:
    """Whether a copy of ``tensor`` is all of it: no wrapper, and readable."""
    if type(tensor) in PLAIN and _keys(tensor).raw_repr() in _dense_keys:
        return tensor.dtype not in _PACKED and _has_memory(tensor)
    if type(tensor).__torch_dispatch__ is not _NO_DISPATCH or tensor.is_nested:
        return False
    return is_dense(tensor) or not _inside(tensor)[1]  # the first remembers what it has seen


def _inside(tensor: Tensor, depth: int = 0) -> tuple[Tensor, str]:
    """The tensor of torch's own that holds the numbers, or why there is none."""
    kind = type(tensor)
    if kind not in PLAIN:
        return _unwrapped(tensor, depth)
    layout = tensor.layout
    if tensor.is_meta:
        return tensor, "a meta tensor has a shape and no numbers"
    if _is_transformed(tensor):
        return tensor, "it belongs to a transformation of torch.func"
    if _is_functional(tensor):
        return tensor, "it stands for a value that is not computed yet"
    if layout is not torch.strided:
        if layout in _SPARSE or layout is _MKLDNN:
            return tensor, ""
        return tensor, f"its layout is {layout}"
    if tensor._is_zerotensor():
        return tensor, "it stands for zeros that have no memory"
    if tensor.is_nested:
        if tensor.is_contiguous():
            return tensor, ""
        return tensor, "its nested parts have gaps between them"
    if tensor.is_quantized:
        return tensor, "it is quantized"
    if tensor.dtype in _PACKED:
        return tensor, "its numbers are packed several to a byte"
    return tensor, "" if _has_memory(tensor) else "its memory was given back or never taken"


def _unwrapped(tensor: Tensor, depth: int) -> tuple[Tensor, str]:
    kind = type(tensor)
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return tensor, "it has no shape yet"
    if kind.__setattr__ is not Tensor.__setattr__ or _has_own_dict(kind):
        return tensor, "its class answers for attributes by itself"
    if kind.__torch_dispatch__ is _NO_DISPATCH:  # memory of its own; only its functions are other
        with torch._C.DisableTorchFunctionSubclass():
            return _inside(tensor.as_subclass(Tensor), depth)
    name = f"{kind.__module__}.{kind.__qualname__}"
    refused = tensor, f"it is a {name}, which has a memory of its own kind"
    # AsyncCollectiveTensor: another process may still be writing to it.
    has_protocol = hasattr(kind, "__tensor_flatten__") and not hasattr(kind, "trigger_wait")
    if depth == MAX_DEPTH or not has_protocol:
        return refused
    try:
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # was just looked for
        # Newer torch names a DTensor's mesh among the parts.
        parts = [p for name in names if isinstance(p := getattr(tensor, name), Tensor)]
    except Exception:  # foreign code, in a state that it did not expect
        return refused
    if not is_dtensor(tensor):
        if tensor.layout is torch.jagged:  # with lengths there are gaps between the rows
            jagged: Any = tensor
            parts = [jagged._values] if getattr(jagged, "_lengths", None) is None else []
        else:
            whole = tensor.shape, tensor.dtype
            parts = [p for p in parts if (p.shape, p.dtype) == whole]
    if len(parts) != 1:
        return refused
    return _inside(parts[0], depth + 1)


def _has_own_dict(kind: type) -> bool:
    """Whether a class below torch's own decides what ``tensor.__dict__`` is. Each plain class has
    a descriptor of that name, which decides nothing."""
    below = (vars(base) for base in kind.__mro__[: kind.__mro__.index(Tensor)])
    held = (own["__dict__"] for own in below if "__dict__" in own)
    return not all(type(one) is types.GetSetDescriptorType for one in held)


def _has_memory(tensor: Tensor) -> bool:
    """Whether its storage reaches as far as its elements. FSDP resizes storages to nothing."""
    if not (count := tensor.numel()):
        return True
    if not tensor.is_contiguous():
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in strides)
    try:
        storage = tensor.untyped_storage()
        held = storage.nbytes()
        if (tensor.storage_offset() + count) * tensor.itemsize > held:
            return False
        # A wrapper that was detached with dispatch off is of torch's own type, has a size and
        # points nowhere.
        return storage.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # a device whose tensors have no storage
        return False


def _strided(tensor: Tensor) -> Tensor:
    """A tensor of torch's own that holds numbers, as a strided one of real numbers."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        tensor = _strided(_stored_values(tensor.detach()))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _stored_values(tensor: Tensor) -> Tensor:
    """A COO tensor's values after the sum over repeated indices, those of compressed and nested
    layouts, an mkldnn tensor's."""
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.layout is _MKLDNN:
        return tensor.to_dense()
    return tensor.values()


def is_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a `torch.distributed.tensor.DTensor`, without importing that."""
    return (
        type(tensor) not in PLAIN
        and hasattr(tensor, "_local_tensor")
        and hasattr(tensor, "placements")
    )


def _is_readable(tensor: Tensor) -> bool:
    """Floating-point numbers that may be read. A look inside jit.trace would become part of the
    traced model. Sparse outputs are left alone: torch has no hooks on their gradients."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    return is_dense(tensor) or not _inside(tensor)[1]


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
