"""Marks on tensors: which op made a tensor, and which bad op its non-finite values descend from.

The first is a plain attribute of the tensor, so it travels with it through the user's code and dies
with it; the path from a sigmoid to a logarithm, or from a matmul to a softmax, is read off it. The
second, the taint, belongs to the memory: a value that is written through one view is read through
another. When the loss or a gradient is not finite, it names the root.

Also here: how ops are used (:class:`Uses`) and the rounding errors of running sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import HALF, has_own_memory
from ampscope.observations import OpUse

PROVENANCE = "_ampscope_provenance"
EXACT = "_ampscope_exact"  # what fp32 would have had: op_exact.Exact
FOREIGN = -1  # the taint of what came with the data or a parameter
INTENDED = -2  # of a constant that was written on purpose: the -inf of a mask
MAX_TAINTS = 1_024  # pieces of memory marked at once; those that are freed go first
CHAIN = 14  # ops looked back and forward: a masked softmax attention takes up to 10
PASSES_ON = frozenset({
    "detach", "view", "_unsafe_view", "t", "transpose", "permute", "expand", "reshape", "alias",
    "unsqueeze", "squeeze", "slice", "select", "as_strided", "empty", "empty_like", "split",
    "_local_scalar_dense", "is_nonzero", "unbind", "empty_strided", "new_empty", "lift_fresh",
})  # fmt: skip
_WEIGHT_ARITHMETIC = frozenset({"mul", "add", "sub", "div", "lerp", "neg"})
_SCALED = (("mul",), ("mul_",), ("div",), ("div_",))
_AVERAGES = (("add",), ("lerp",), ("sub",))  # what a copied average was made by


class Provenance:
    """The op that made a tensor, and the names of the ops before it, nearest first.

    Names are flattened and bounded: a linked graph of ops would keep a whole training run alive.
    """

    __slots__ = ("learned", "names", "parameter", "scalar", "watchers")

    def __init__(
        self, name: str, parents: list[Provenance], watchers: tuple[int, ...], scalar: float | None
    ) -> None:
        chains = [parent.names for parent in parents[:3]]
        mixed = [n for group in zip_longest(*chains) for n in group if n is not None]
        self.names: tuple[str, ...] = (name, *mixed[: CHAIN - 1])
        self.watchers = watchers  # bad ops whose consumers are still being collected
        self.parameter = False  # a view or cast of a parameter
        self.learned = False  # it depends on parameters or gradients
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
    tensor.__dict__.pop(PROVENANCE, None)
    tensor.__dict__.pop(EXACT, None)


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
    """How the root of a backward pass was made, "mul 65536" for a loss times a constant."""
    provenance = provenance_of(loss)
    if provenance is None:
        return ""
    return (
        provenance.names[0]
        if provenance.scalar is None
        else f"{provenance.names[0]} {provenance.scalar:g}"
    )


def constant(args: Any) -> float | None:
    """The first constant among an op's arguments after its first: a number, or a 0-d tensor that
    no watched op made."""
    for part in args[1:] if isinstance(args, tuple) else ():
        if isinstance(part, int | float) and not isinstance(part, bool):
            return float(part)
        if isinstance(part, Tensor) and part.dim() == 0 and not hasattr(part, PROVENANCE):
            return part.item() if part.is_floating_point() and has_own_memory(part) else None
    return None


def adds_to_what_lives_on(name: str, args: Any) -> bool:
    """Whether the op is a term of a running sum: an in-place sum, a sum of its own result, or a
    copy of a freshly computed average. A residual addition is none of these."""
    if name in IN_PLACE or name == "lerp_":
        return not torch.is_grad_enabled() or not args[0].requires_grad
    if name == "copy_":
        source = producers(args[1])
        return source[:1] in _AVERAGES or source[:2] == ("_to_copy", "add")
    made = producers(args[0])[:3]
    return name in made or (not torch.is_grad_enabled() and made[:1] == ("mul",))


# Facts about how ops are used that matter without any non-finite value: each once per line.


HALF_EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half an ulp at 1
MOST_NAMED = 3  # places in the sentence on what was not judged
PHASE_ERROR = 0.25  # radians by which the argument of a sine may be off through rounding alone

# Matmuls of integers, which no control can run in another precision.
_WHOLE = frozenset({
    "_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu",
    "_dyn_quant_matmul_4bit", "_scaled_mm", "_scaled_grouped_mm", "_scaled_mm_v2",
})  # fmt: skip
FIXED = "fixed_precision"  # the fact's name
_OWN_ARITHMETIC = Tensor.__torch_dispatch__

Place = Callable[[], tuple[str, str]]


class Uses:
    """Collects :class:`OpUse` records, at most one a (fact, line)."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], OpUse] = {}

    def records(self) -> list[OpUse]:
        """All facts so far, in the order of their first sight."""
        return list(self._found.values())

    def note(
        self, func: Any, args: Any, tensors: list[Tensor], out: Any, autocast: str, step: int,
        place: Place,
    ) -> None:  # fmt: skip
        """Look at one op; ``place`` gives (module, line) and is asked only when a fact is found."""
        for fact, *numbers in _facts(func._opname, args, tensors, out, autocast):
            self.add(fact, func._opname, step, place, *numbers)

    def subclasses(self, name: str, types: Sequence[type], step: int, place: Place) -> None:
        """Op ``name`` was given tensors of these types. One from outside torch, such as torchao's
        quantized weights, computes by rules of its own, which a control does not change."""
        for kind in types:
            own = getattr(kind, "__torch_dispatch__", _OWN_ARITHMETIC) is not _OWN_ARITHMETIC
            if own and not kind.__module__.startswith("torch."):
                self.add(FIXED, f"{name} of {kind.__name__}", step, place)

    def custom_function(self, name: str, decorated: bool, step: int, place: Place) -> None:
        """A user's autograd.Function ran under autocast."""
        fact = "custom_function" if decorated else "undecorated_function"
        self.add(fact, name, step, place)

    def add(
        self, fact: str, op: str, step: int, place: Place, value: float | None = None,
        other: float | None = None,
    ) -> None:  # fmt: skip
        """Note a fact at the place where it was seen; again only counts it."""
        module, line = place()
        known = self._found.get((fact, line))
        if known is not None:
            self._found[fact, line] = dataclasses.replace(known, count=known.count + 1)
        else:
            self._found[fact, line] = OpUse(fact, op, module, line, step, value, other)


def _facts(
    name: str, args: Any, tensors: list[Tensor], out: Any, autocast: str
) -> Iterator[tuple[Any, ...]]:
    """The facts about a call of op ``name``, each with up to two numbers."""
    if name in _WHOLE or _is_eight_bit(tensors, out):
        yield (FIXED,)
    is_half = isinstance(out, Tensor) and out.dtype in HALF_EPSILON
    if name == "binary_cross_entropy" and autocast:
        yield ("bce_under_autocast",)
    elif name in ("arange", "linspace") and is_half and out.numel() > 1:
        distinct = int(torch.unique(out).numel())
        if distinct < out.numel():
            yield "half_range", distinct, out.numel()
    elif name == "_to_copy" and is_half and tensors:
        yield from _cast_positions(tensors[0], out)
    elif name in ("sin", "cos") and tensors and tensors[0].dtype in HALF_EPSILON:
        largest = float(tensors[0].detach().abs().float().max()) if tensors[0].numel() else 0.0
        error = largest * HALF_EPSILON[tensors[0].dtype]
        if math.isfinite(error) and error > PHASE_ERROR:
            yield "half_learned_phase" if is_learned(tensors[0]) else "half_phase", error, largest
    elif name in ("_softmax", "_log_softmax") and tensors and tensors[0].numel():
        masked = torch.isneginf(tensors[0])
        if bool(masked.any()):
            empty = masked.all(dim=args[1]) if masked.dim() else masked
            if rows := int(empty.sum()):
                yield "fully_masked_row", rows, empty.numel()


def _cast_positions(source: Tensor, out: Tensor) -> Iterator[tuple[Any, ...]]:
    """Whole numbers, or a range, that coincide after the cast to half."""
    provenance = provenance_of(source)
    is_range = provenance is not None and provenance.names[0] in ("arange", "linspace")
    if out.numel() < 2 or source.dtype == torch.bool:
        return
    if is_range or not source.is_floating_point():
        before, after = int(torch.unique(source).numel()), int(torch.unique(out).numel())
        if after < before:
            yield "half_range", after, before


def fixed_sentence(uses: Sequence[OpUse]) -> str:
    """What was not judged, for the notes; "" when all was."""
    found = [use for use in uses if use.name == FIXED]
    if not found:
        return ""
    places = [f"{use.op} at {use.line}" if use.line else use.op for use in found[:MOST_NAMED]]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return (
        f"Not judged: {', '.join(places)}{more}. The fp32 control computes these in 8 bits or in a"
        " tensor type of its own too, so what they lose shows in no comparison."
    )


def _is_eight_bit(tensors: Sequence[Tensor], out: Any) -> bool:
    results = out if isinstance(out, list | tuple) else (out,)
    return any(
        isinstance(t, Tensor) and t.is_floating_point() and t.itemsize == 1
        for t in (*tensors, *results)
    )


# How much a running sum in half precision has lost so far: the rounding errors added up.
#
# A single addition to a half-precision total is off by at most half an ulp, and errors of both
# signs cancel. When the terms are below half an ulp of the total, every error has the sign of the
# term, and their sum grows without bound: fp16 stops counting at 2,048, bf16 at 256.


IN_PLACE = ("add_", "sub_", "index_add_", "scatter_add_", "_index_put_impl_", "index_put_")
MAX_NUMEL = 1 << 20
MAX_SUMS = 200  # lines of a script that add up something; more are not followed
MAX_TOTALS = 64  # of one line and shape, as of a loop over the parameters
STARTS_ANEW = 0.5  # of the last total; a moving average keeps more than half of itself
TOUCHED = 0.05  # share of a sum's elements that must be off: one outlier is no pattern


class RunningSums:
    """Errors so far, by line and shape, of each total that the line adds to."""

    def __init__(self) -> None:
        self._sums: dict[tuple[object, ...], list[_RunningSum]] = {}  # the newest last

    def drift(
        self, line: object, func: Any, args: Any, kwargs: Any, before: Tensor, out: Tensor
    ) -> float | None:
        """Median over the elements that are off of |sum of errors| / |total|; None when few are.

        A sum goes on where ``before`` is a total that the line has made; or the newest one times a
        factor, as a moving average is, which keeps more than half of itself. Any other first term
        begins a sum: what a gate of a recurrence adds is new at each time-step, and its roundings
        do not add up.
        """
        if func._opname in ("lerp_", "copy_") or not 0 < before.numel() <= MAX_NUMEL:
            return None
        expected = _in_fp32(func, args, kwargs, before)
        if expected is None or expected.shape != out.shape:
            return None
        key = (line, tuple(out.shape))
        if key not in self._sums and len(self._sums) >= MAX_SUMS:
            return None
        sums = self._sums.setdefault(key, [])
        error = expected - out.float()
        known = _continued(sums, before, is_scaled=_is_scaled(func._opname, args[0]))
        if known is not None:
            sums.remove(known)
            error = known.error + error
        total = out.float().abs()
        sums.append(_RunningSum(out.detach().clone(), float(total.max()), error))
        del sums[: -max(1, min(MAX_TOTALS, MAX_NUMEL // out.numel()))]
        relative = error.abs()[total > 0] / total[total > 0]
        off = relative[relative > 0]
        if not off.numel() or off.numel() < TOUCHED * out.numel():
            return None
        return float(off.median())


@dataclasses.dataclass(eq=False, slots=True)
class _RunningSum:
    total: Tensor
    largest: float  # magnitude in it
    error: Tensor  # added up


def _continued(sums: list[_RunningSum], before: Tensor, *, is_scaled: bool) -> _RunningSum | None:
    """The sum whose next term is added to ``before``; None where one begins."""
    largest = float(before.float().abs().max())
    for known in reversed(sums):
        if known.largest == largest and torch.equal(known.total, before):
            return known
    newest = sums[-1] if sums else None
    return newest if newest and is_scaled and largest > STARTS_ANEW * newest.largest else None


def _is_scaled(name: str, first: Tensor) -> bool:
    """The first term is a product; an op in place is itself the last that made it."""
    made = producers(first)
    made = made[1:] if made[:1] == (name,) and name in IN_PLACE else made
    return made[:1] in _SCALED


def _in_fp32(func: Any, args: Any, kwargs: Any, before: Tensor) -> Tensor | None:
    rest = [a.float() if isinstance(a, Tensor) and a.dtype in HALF else a for a in args[1:]]
    try:
        result = func(before.float(), *rest, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return result if isinstance(result, Tensor) else None
