"""Instrument: facts about how ops are used that matter without any non-finite value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.script.op_taint import is_learned, provenance_of
from ampscope.observations import OpUse

HALF_EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half an ulp at 1
MOST_NAMED = 3  # places in the sentence on what was not judged
PHASE_ERROR = 0.25  # radians by which the argument of a sine may be off through rounding alone

# Matmuls of integers, which no control can run in another precision.
_WHOLE = frozenset({
    "_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu",
    "_dyn_quant_matmul_4bit", "_scaled_mm", "_scaled_grouped_mm", "_scaled_mm_v2",
})  # fmt: skip
# Ops without half precision of which there may be a fact all the same.
CONCERNING = _WHOLE | {"binary_cross_entropy", "_softmax", "_log_softmax"}
FIXED = "fixed_precision"  # the fact's name
HALF_WHOLE = "half_whole"  # a cast of half to integers: how many beyond the format's, of how many
_OWN_ARITHMETIC = Tensor.__torch_dispatch__

Place = Callable[[], tuple[str, str]]


class OpUses:
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
    elif name == "_to_copy" and isinstance(out, Tensor) and tensors:
        yield from _whole_out_of_half(tensors[0], out)
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


def _is_eight_bit(tensors: Sequence[Tensor], out: Any) -> bool:
    results = out if isinstance(out, list | tuple) else (out,)
    return any(
        isinstance(t, Tensor) and t.is_floating_point() and t.itemsize == 1
        for t in (*tensors, *results)
    )


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


def _whole_out_of_half(source: Tensor, out: Tensor) -> Iterator[tuple[Any, ...]]:
    """Labels, ids or indices that come out of a format without all of their values."""
    is_whole = not out.is_floating_point() and not out.is_complex() and out.dtype != torch.bool
    if not is_whole or source.dtype not in HALF_EPSILON or not out.numel() or is_learned(source):
        return
    beyond = source.float().abs()[torch.isfinite(source)] > 1 / HALF_EPSILON[source.dtype]
    if count := int(beyond.sum()):
        yield HALF_WHOLE, count, out.numel()


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
