"""Marks on tensors: which op made a tensor, and which bad op its non-finite values descend from.

The first is a plain attribute of the tensor, so it travels with it through the user's code and dies
with it; the path from a sigmoid to a logarithm, or from a matmul to a softmax, is read off it. The
second, the taint, belongs to the memory: a value that is written through one view is read through
another. When the loss or a gradient is not finite, it names the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.stale_copies import WeightCopy
from ampscope.capture.tensors import has_own_memory

PROVENANCE = "_ampscope_provenance"
EXACT = "_ampscope_exact"  # what fp32 would have had: op_exact.Exact
MADE = "_ampscope_made"  # the number of the op that made it: cancellation.Cancellations
FOREIGN = -1  # the taint of what came with the data or a parameter
INTENDED = -2  # of a constant that was written on purpose: the -inf of a mask
MAX_TAINTS = 1_024  # pieces of memory marked at once; those that are freed go first
CHAIN = 14  # ops looked back and forward: a masked softmax attention takes up to 10
PASSES_ON = frozenset({
    "detach", "view", "_unsafe_view", "t", "transpose", "permute", "expand", "reshape", "alias",
    "unsqueeze", "squeeze", "slice", "select", "as_strided", "empty", "empty_like", "split",
    "_local_scalar_dense", "is_nonzero", "unbind", "empty_strided", "new_empty", "lift_fresh",
})  # fmt: skip
_PRODUCTS = {"MulBackward0": "mul", "DivBackward0": "div"}
_NUMBERS = (torch.float64, torch.int64)  # as which autograd keeps a number of Python's
_WEIGHT_ARITHMETIC = frozenset({"mul", "add", "sub", "div", "lerp", "neg"})


class Provenance:
    """The op that made a tensor, and the names of the ops before it, nearest first.

    Names are flattened and bounded: a linked graph of ops would keep a whole training run alive.
    """

    __slots__ = ("copied", "learned", "names", "parameter", "scalar", "watchers")

    def __init__(
        self, name: str, parents: list[Provenance], watchers: tuple[int, ...], scalar: float | None
    ) -> None:
        chains = [parent.names for parent in parents[:3]]
        mixed = [n for group in zip_longest(*chains) for n in group if n is not None]
        self.names: tuple[str, ...] = (name, *mixed[: CHAIN - 1])
        self.watchers = watchers  # bad ops whose consumers are still being collected
        self.parameter = False  # a view or cast of a parameter
        self.learned = False  # it depends on parameters or gradients
        self.copied: WeightCopy | None = None  # a half copy of a weight, or a view of one
        self.scalar = scalar  # the Python constant that the op took, if any


def without_watchers(
    name: str, parents: list[Provenance], args: Any, inputs: Sequence[Tensor]
) -> Provenance:
    """The mark of a result of op ``name``, which no bad op leads to."""
    provenance = Provenance(name, parents, (), constant(args))
    provenance.parameter = is_still_parameter(name, inputs)
    provenance.learned = any(map(is_learned, inputs))
    return provenance


class Taints:
    """Which bad op the non-finite values in a piece of memory descend from: its id,
    :data:`FOREIGN` or :data:`INTENDED`.

    A storage is known by its address, which cannot be given away again while a weak reference to it
    is held. The values themselves may be freed.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, int]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, tensor: Tensor) -> int | None:
        """The taint of the memory that ``tensor`` lies in; its own values may be finite."""
        if not self._of or (storage := _storage(tensor)) is None:
            return None
        found = self._of.get(storage._cdata)
        return None if found is None else found[1]

    def mark(self, tensor: Tensor, taint: int) -> None:
        """``tensor`` holds non-finite values with this taint. A constant that is written into a
        part of a tensor does not hide what the rest of it holds."""
        storage = _storage(tensor)
        if storage is None:
            return
        before = self._of.get(storage._cdata)
        known = INTENDED if before is None else before[1]
        if taint < 0 and taint < known and not _is_whole(tensor, storage):
            return
        if before is None and len(self._of) >= MAX_TAINTS:
            self._forget_freed()
        held = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._of[storage._cdata] = (held, taint)

    def clear(self, tensor: Tensor) -> None:
        """``tensor`` is finite now."""
        storage = _storage(tensor) if self._of else None
        if storage is not None and storage._cdata in self._of and _is_whole(tensor, storage):
            del self._of[storage._cdata]

    def _forget_freed(self) -> None:
        for key, (held, _) in list(self._of.items()):
            if held.expired():  # type: ignore[no-untyped-call]  # torch leaves it untyped
                del self._of[key]
        while len(self._of) >= MAX_TAINTS:  # the oldest
            del self._of[next(iter(self._of))]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    if not has_own_memory(tensor):
        return None
    try:
        if tensor.is_sparse:
            with own_ops():
                return tensor._values().untyped_storage()
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # wrappers of torch.func
        return None


def _is_whole(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether there is nothing in the memory besides ``tensor``."""
    return tensor.is_sparse or tensor.numel() * tensor.itemsize == storage.nbytes()


def provenance_of(tensor: Tensor) -> Provenance | None:
    """The mark of the op that made ``tensor``; None for what no watched op made."""
    found: Provenance | None = getattr(tensor, PROVENANCE, None)
    return found


def producers(tensor: Tensor) -> tuple[str, ...]:
    """Names of the ops that led to ``tensor``, nearest first."""
    provenance = provenance_of(tensor)
    return () if provenance is None else provenance.names


def unmark(tensor: Tensor) -> None:
    """Take the marks off."""
    for mark in (PROVENANCE, EXACT, MADE):
        tensor.__dict__.pop(mark, None)


def is_learned(tensor: Tensor) -> bool:
    """Whether ``tensor`` depends on a parameter or a gradient: it is not made of data alone."""
    provenance = provenance_of(tensor)
    return tensor.requires_grad or (provenance is not None and provenance.learned)


def is_parameter(tensor: Tensor) -> bool:
    """A parameter, or a view or cast of one."""
    provenance = provenance_of(tensor)
    return isinstance(tensor, nn.Parameter) or (provenance is not None and provenance.parameter)


def is_still_parameter(name: str, inputs: Sequence[Tensor]) -> bool:
    """Whether op ``name`` makes a view, cast, average or update by hand of a parameter."""
    passes = name in PASSES_ON or name == "_to_copy"
    # Without gradients, arithmetic on weights is an average of weights or an update by hand.
    passes = passes or (name in _WEIGHT_ARITHMETIC and not torch.is_grad_enabled())
    return passes and any(map(is_parameter, inputs))


def root_of_loss(loss: Tensor) -> str:
    """How the root of a backward pass was made, "mul 65536" for a loss times a constant. Where no
    op was watched, autograd knows the product with a number."""
    provenance = provenance_of(loss)
    if provenance is None:
        return _product(loss.grad_fn)
    return (
        provenance.names[0]
        if provenance.scalar is None
        else f"{provenance.names[0]} {provenance.scalar:g}"
    )


def _product(node: Any) -> str:
    name = "" if node is None else _PRODUCTS.get(node.name(), "")
    with own_ops():  # the script has read no number
        number = getattr(node, "_saved_other", None) if name else None
        if not isinstance(number, Tensor) or number.dim() or number.dtype not in _NUMBERS:
            return ""
        return f"{name} {number.item():g}"


def constant(args: Any) -> float | None:
    """The first constant among an op's arguments after its first: a number, or a 0-d tensor that
    no watched op made."""
    for part in args[1:] if isinstance(args, tuple) else ():
        if isinstance(part, int | float) and not isinstance(part, bool):
            return float(part)
        if isinstance(part, Tensor) and part.dim() == 0 and not hasattr(part, PROVENANCE):
            return part.item() if part.is_floating_point() and has_own_memory(part) else None
    return None
