"""Ops of an fp32 run that carry, tensor by tensor, what they would be under O1 and under O2.

The same replacement of ops as in :mod:`emulation`, but nothing is rounded: a tensor that would be
half under a level gets a mark of that level, and the next op decides by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import paddle

from ampscope.frameworks.paddle.emulation import Emulation
from ampscope.frameworks.paddle.op_arguments import NAMES, Tensor, inputs_of
from ampscope.frameworks.paddle.op_names import FIRST_INPUT_ONLY
from ampscope.frameworks.paddle.regions import (
    AUTO_CAST,
    DTYPES,
    HALF,
    OpenRegion,
    Region,
    dtype_of_op,
)
from ampscope.frameworks.paddle.values import floating_tensors

LEVELS = ("O1", "O2")
Planned = tuple[str, str, tuple[str, ...], tuple[str, ...]]  # layer, op, lists, dtypes by level
_TARGETS = {paddle.float16: "fp16", paddle.bfloat16: "bf16", **HALF}


class PlannedOps(Emulation):
    """``layer`` gives the dotted path of the layer that is running, or None before any has run;
    ``roots`` the root models."""

    def __init__(
        self, half: str, layer: Callable[[], str | None], roots: Callable[[], list[Any]]
    ) -> None:
        super().__init__(OpenRegion("fp32"))
        self.plan: Counter[Planned] = Counter()
        self.seen: Counter[tuple[str, int]] = Counter()  # every op, with its inputs' number
        self._half, self._layer, self._roots = half, layer, roots
        self._own_regions = False  # the script opens some: outside them nothing is cast
        self._decorated: set[int] = set()
        self._known_roots = 0

    def run(self, function: Callable[..., Any], op: str, args: Any, kwargs: Any) -> Any:
        """Run in fp32; note what it would be."""
        found = inputs_of(args, kwargs)
        result = function(*args, **kwargs)
        if not found:
            return result
        self.seen[op, len(found)] += 1
        self._learn_parameters()
        lists, targets = [], []
        for level in LEVELS:
            region = self._region(level)
            target = dtype_of_op(region, op, [self._dtype(t, level) for t in found])
            lists.append("" if region is None else region.word(op))
            targets.append(target)
            outputs = floating_tensors(result)
            for tensor in outputs[:1] if op in FIRST_INPUT_ONLY else outputs:
                if target != "fp32" and tensor.dtype == paddle.float32:
                    setattr(tensor, _mark(level), target)
        layer = self._layer()
        if layer is not None:
            self.plan[layer, op, tuple(lists), tuple(targets)] += 1
        return result

    def run_in_place(self, function: Callable[..., Any], op: str, args: Any, kwargs: Any) -> Any:
        """The first argument keeps its marks."""
        found = inputs_of(args, kwargs)
        if found:
            self.seen[op, len(found)] += 1
        return function(*args, **kwargs)

    def cast(self, function: Callable[..., Any], tensor: Any, dtype: Any) -> Any:
        """A cast to half is a mark; one to fp32 leaves none."""
        target = _TARGETS.get(dtype)
        if target is None:
            return function(tensor, dtype)
        result = function(tensor, paddle.float32)
        for level in LEVELS:
            setattr(result, _mark(level), target)
        return result

    def _region(self, level: str) -> Region | None:
        """The script's own region at this level; one around everything where it opens none."""
        state = AUTO_CAST._g_amp_state_
        self._own_regions |= state is not None
        if self._own_regions and (state is None or not state["enable"]):
            return None
        white = state["custom_white_list"] if state else None
        black = state["custom_black_list"] if state else None
        names = AUTO_CAST._update_list(white, black, level, DTYPES[self._half])
        return Region(self._half, level, frozenset(names[0]), frozenset(names[1]))

    def _dtype(self, tensor: Tensor, level: str) -> str:
        mark = getattr(tensor, _mark(level), None)
        if mark is None and level == "O2" and id(tensor) in self._decorated:
            mark = self._half
        return mark or NAMES[tensor.dtype]

    def _learn_parameters(self) -> None:
        """Those that ``decorate(level="O2")`` would cast, of every model that has been called."""
        roots = self._roots()
        if len(roots) == self._known_roots:
            return
        self._known_roots = len(roots)
        for layer in (part for root in roots for part in root.sublayers(include_self=True)):
            if not AUTO_CAST.need_keep_fp32(layer, DTYPES[self._half]):
                self._decorated |= {id(p) for p in layer._parameters.values() if p is not None}


def _mark(level: str) -> str:
    return f"_ampscope_{level}"
