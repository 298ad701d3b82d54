"""Facts about how ops are used that matter without any non-finite value: each once per line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.script.op_marks import maker_of
from ampscope.observations import OpUse

HALF_EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half an ulp at 1
MOST_NAMED = 3  # places in the sentence on what was not judged
PHASE_ERROR = 0.25  # radians by which the argument of a sine may be off through rounding alone

# Matrix products of whole numbers, which no control can run in another precision.
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
        self, func: Any, args: Any, tensors: list[Tensor], out: Any, autocast: str, attempt: int,
        place: Place,
    ) -> None:  # fmt: skip
        """Look at one op; ``place`` gives (module, line) and is asked only when a fact is found."""
        name = func._opname
        if name in _WHOLE or _is_eight_bit(tensors, out):
            self.add(FIXED, name, attempt, place)
        if name == "binary_cross_entropy" and autocast:
            self.add("bce_under_autocast", name, attempt, place)
        elif name in ("arange", "linspace") and isinstance(out, Tensor):
            if out.dtype in HALF_EPSILON and out.numel() > 1:
                distinct = int(torch.unique(out).numel())
                if distinct < out.numel():
                    self.add("half_range", name, attempt, place, distinct, out.numel())
        elif name == "_to_copy" and isinstance(out, Tensor) and out.dtype in HALF_EPSILON:
            self._cast_positions(tensors, out, name, attempt, place)
        elif name in ("sin", "cos") and tensors and tensors[0].dtype in HALF_EPSILON:
            largest = float(tensors[0].detach().abs().float().max()) if tensors[0].numel() else 0.0
            error = largest * HALF_EPSILON[tensors[0].dtype]
            if math.isfinite(error) and error > PHASE_ERROR:
                self.add("half_phase", name, attempt, place, error, largest)
        elif name in ("_softmax", "_log_softmax") and tensors:
            self._softmax_row(tensors[0], args, name, attempt, place)

    def subclasses(self, name: str, types: Sequence[type], attempt: int, place: Place) -> None:
        """Op ``name`` was given tensors of these types. One from outside torch, such as torchao's
        quantized weights, computes by rules of its own, which a control does not change."""
        for kind in types:
            own = getattr(kind, "__torch_dispatch__", _OWN_ARITHMETIC) is not _OWN_ARITHMETIC
            if own and not kind.__module__.startswith("torch."):
                self.add(FIXED, f"{name} of {kind.__name__}", attempt, place)

    def custom_function(self, name: str, decorated: bool, attempt: int, place: Place) -> None:
        """A user's autograd.Function ran under autocast."""
        fact = "custom_function" if decorated else "undecorated_function"
        self.add(fact, name, attempt, place)

    def _cast_positions(
        self, tensors: list[Tensor], out: Tensor, name: str, attempt: int, place: Place
    ) -> None:
        """Whole numbers, or a range, that coincide after the cast to half."""
        if not tensors or out.numel() < 2 or tensors[0].dtype == torch.bool:
            return
        source = tensors[0]
        maker = maker_of(source)
        is_range = maker is not None and maker.names[0] in ("arange", "linspace")
        if source.is_floating_point() and not is_range:
            return
        before, after = int(torch.unique(source).numel()), int(torch.unique(out).numel())
        if after < before:
            self.add("half_range", name, attempt, place, after, before)

    def _softmax_row(
        self, scores: Tensor, args: Any, name: str, attempt: int, place: Place
    ) -> None:
        if scores.numel() == 0 or not bool(torch.isneginf(scores).any()):
            return
        empty = torch.isneginf(scores).all(dim=args[1]) if scores.dim() else torch.isneginf(scores)
        rows = int(empty.sum())
        if rows:
            self.add("fully_masked_row", name, attempt, place, rows, empty.numel())

    def add(
        self, fact: str, op: str, attempt: int, place: Place, value: float | None = None,
        other: float | None = None,
    ) -> None:  # fmt: skip
        """Note a fact at the place where it was seen; again only counts it."""
        module, line = place()
        known = self._found.get((fact, line))
        if known is not None:
            self._found[fact, line] = dataclasses.replace(known, count=known.count + 1)
        else:
            self._found[fact, line] = OpUse(fact, op, module, line, attempt, value, other)


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
