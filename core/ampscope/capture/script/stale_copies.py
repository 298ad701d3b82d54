"""Instrument: half-precision copies of weights that are used after the weight has changed.

Autocast keeps the half copy of each fp32 weight until the outermost region closes, whatever is done
to the weight meanwhile; a script may keep one itself (``self.w16 = self.weight.half()``). A copy is
followed from the cast to the ops that take it, and at each use after the first some of its numbers
are compared with those that a cast of the weight would give now. Version counters do not tell:
``weight.data.copy_`` leaves them as they are, and a step that was left out may not.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.optimizer_facts import evenly
from ampscope.capture.tensors import HALF, readable
from ampscope.observations import STALE_CACHED, STALE_KEPT, OpUse

SAMPLED = 64  # numbers of a weight that are compared
LOOKS = 8  # uses of a copy within one step that are looked at: a recurrent cell has many


@dataclass(frozen=True, slots=True)
class Region:
    """An outermost autocast region: which one it is, and the line that opened it."""

    number: int
    line: str


class WeightCopy:
    """The half copy of a weight: some of its numbers, and where it was made."""

    __slots__ = ("_weight", "line", "looks", "numbers", "region", "step")

    def __init__(self, weight: Tensor, copy: Tensor, region: Region | None, line: str) -> None:
        self._weight = weakref.ref(weight)
        self.numbers = evenly(copy, SAMPLED).clone()
        self.region = region  # that autocast may keep it in
        self.line = line
        self.step, self.looks = -1, 0  # the step in which it was looked at last, and how often

    @property
    def weight(self) -> Tensor | None:
        """What it was made of; None where that is gone."""
        return self._weight()

    def distance(self) -> float:
        """How far the copy is from what a cast would give now, by the weight's own 2-norm."""
        weight = self.weight
        values = None if weight is None else readable(weight)
        if values is None:
            return 0.0
        now = evenly(values, SAMPLED).to(self.numbers.dtype)
        if now.shape != self.numbers.shape or torch.equal(now, self.numbers):
            return 0.0
        change = torch.linalg.vector_norm(now.float() - self.numbers.float())
        return float(change / torch.linalg.vector_norm(now.float()).clamp(min=1e-30))


class StaleCopies:
    """Follows copies of weights, and keeps one record for each place that holds stale ones."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], OpUse] = {}
        self._weights: dict[tuple[str, str], set[int]] = {}  # ids of the weights
        self._last: dict[tuple[str, str], int] = {}  # the step that was counted last

    def made(
        self, weight: Tensor, copy: Tensor, region: Region | None, line: Callable[[], str]
    ) -> WeightCopy | None:
        """``weight`` was cast to ``copy``; None where that is no weight that a step may change.
        ``region`` is the autocast region that would keep the copy."""
        is_weight = weight.is_leaf and weight.requires_grad and weight.dtype is torch.float32
        if not is_weight or copy.dtype not in HALF or not torch.is_grad_enabled():
            return None
        with own_ops():
            if readable(weight) is None or readable(copy) is None or not copy.numel():
                return None
            return WeightCopy(weight, copy.detach(), region, line())

    def used(
        self,
        copy: WeightCopy,
        op: str,
        step: int,
        region: Region | None,
        module: Callable[[], str],
    ) -> None:
        """An op took the copy: is it still one of the weight?"""
        if copy.step < 0:  # the op that it was made for
            copy.step = step
            return
        copy.looks = copy.looks + 1 if copy.step == step else 0
        copy.step = step
        is_cached = copy.region is not None and copy.region == region
        # A copy that the script holds may be meant to lag behind where nothing is learned from it.
        if copy.looks >= LOOKS or not (is_cached or torch.is_grad_enabled()):
            return
        with own_ops():
            distance = copy.distance()
        if distance:
            self._add(copy, op, step, distance, module, is_cached=is_cached)

    def _add(
        self,
        copy: WeightCopy,
        op: str,
        step: int,
        distance: float,
        module: Callable[[], str],
        *,
        is_cached: bool,
    ) -> None:
        line = copy.region.line if is_cached and copy.region is not None else copy.line
        key = STALE_CACHED if is_cached else STALE_KEPT, line
        found = self._found.get(key) or OpUse(*key[:1], op, module(), line, step, 0.0, 0.0)
        weights = self._weights.setdefault(key, set())
        weights.add(id(copy.weight))
        self._found[key] = dataclasses.replace(
            found,
            value=(found.value or 0.0) + (self._last.get(key) != step),
            other=max(found.other or 0.0, distance),
            count=len(weights),
        )
        self._last[key] = step

    def records(self) -> list[OpUse]:
        """What was found so far: ``value`` steps computed with stale copies of ``count`` weights,
        which were off by up to ``other`` of the weight's norm."""
        return list(self._found.values())
