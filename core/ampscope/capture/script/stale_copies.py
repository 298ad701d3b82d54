"""Instrument: half-precision copies of weights that are used after the weight has changed.

Autocast keeps the half copy of each fp32 weight until the outermost region closes, whatever is done
to the weight meanwhile; a script may keep one itself (``self.w16 = self.weight.half()``). A copy is
followed from the cast to the ops that take it, and at each use after the first some of its numbers
are compared with those that a cast of the weight would give now. A half model that lends its
gradients to fp32 weights is such a copy too. Version counters do not tell:
``weight.data.copy_`` leaves them as they are, and a step that was left out may not.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.optimizer_facts import evenly
from ampscope.capture.tensors import HALF, holds_numbers, readable
from ampscope.capture.user_objects import IdMap, parameters, parameters_of
from ampscope.observations import STALE_CACHED, STALE_KEPT, STALE_MODEL, OpUse

SAMPLED = 64  # numbers of a weight that are compared
DELAYED = 2  # steps; two losses in one region, with a step between, learn as delayed ones do
LOOKS = 8  # uses of a copy within one step that are looked at: a recurrent cell has many
PAIRED = 4  # first steps of optimizers at which copies in half models are looked for
ALIKE = 1e-5  # distance of two gradients of length 1 that are the same; half rounds by 2^-9


@dataclass(frozen=True, slots=True)
class Region:
    """An outermost autocast region: which one it is, and the line that opened it."""

    number: int
    line: str


class WeightCopy:
    """The half copy of a weight: some of its numbers, and where it was made."""

    __slots__ = ("_weight", "first", "line", "looks", "numbers", "region", "step")

    def __init__(self, weight: Tensor, copy: Tensor, region: Region | None, line: str) -> None:
        self._weight = weakref.ref(weight)
        self.numbers = evenly(copy, SAMPLED).clone()
        self.region = region  # that autocast may keep it in
        self.line = line
        self.first = -1  # the step that it was made in
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
            copy.first = copy.step = step
            return
        copy.looks = copy.looks + 1 if copy.step == step else 0
        copy.step = step
        is_cached = copy.region is not None and copy.region == region
        # A copy that the script holds may be meant to lag behind where nothing is learned from it.
        if copy.looks >= LOOKS or not (is_cached or torch.is_grad_enabled()):
            return
        if 0 < step - copy.first <= DELAYED:
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


class ModelCopies:
    """Half models that compute the gradients by which an optimizer steps fp32 weights. After each
    step the weights have to be copied back."""

    def __init__(self) -> None:
        self._copies: IdMap[Tensor, WeightCopy] = IdMap()  # by the half parameter
        self._looks = 0

    def before_step(
        self, optimizer: Optimizer, models: Callable[[], list[nn.Module]], step: int
    ) -> None:
        """Gradients are complete; ``models`` are those that have run. What looks like a copy once
        has to lend its gradient again: a teacher may have that of its pupil while they are
        equal."""
        if self._looks >= PAIRED:
            return
        self._looks += 1
        with own_ops():
            for half, copy in self._copies.items():
                weight = copy.weight
                if weight is None or not _lends_gradient(half, weight):
                    self._copies.pop(half)
                else:
                    copy.looks += copy.step < step
        for half, weight in copied_weights(optimizer, models()):
            if half not in self._copies:
                copy = self._copies[half] = WeightCopy(weight, half.detach(), None, "")
                copy.step = step

    def records(self, steps: int) -> list[OpUse]:
        """One, of the copies that have never been written in ``steps`` steps so far while their
        weights went on."""
        found = []
        for half, copy in self._copies.items():
            with own_ops():
                values = readable(half)
                stands = values is not None and torch.equal(evenly(values, SAMPLED), copy.numbers)
                distance = copy.distance() if stands and copy.looks else 0.0
            if distance:
                found.append((copy.step + 1, distance))
        if not found:
            return []
        first, farthest = min(step for step, _ in found), max(distance for _, distance in found)
        count = len(found)
        return [OpUse(STALE_MODEL, "", "", "", first, float(steps - first), farthest, count)]


def copied_weights(
    optimizer: Optimizer, models: Sequence[nn.Module]
) -> list[tuple[Tensor, Tensor]]:
    """Parameters of half models and the fp32 weights of ``optimizer`` that they are copies of: the
    weight rounded is the copy, and the gradient that is about to step the weight is the copy's
    times a constant."""
    wide = [p for p in parameters_of(optimizer) if p.dtype is torch.float32 and p.grad is not None]
    if not wide:
        return []
    halves = [
        p
        for model in models
        for _, p in parameters(model)
        if p.dtype in HALF and p.grad is not None and holds_numbers(p)
    ]
    with own_ops():
        return [(h, w) for h in halves for w in wide if h.shape == w.shape and _is_copy(h, w)]


def _is_copy(half: Tensor, weight: Tensor) -> bool:
    own, wide = readable(half), readable(weight)
    if own is None or wide is None:
        return False
    numbers = evenly(own, SAMPLED)
    if not torch.equal(numbers, evenly(wide, SAMPLED).to(half.dtype)):
        return False
    if bool((numbers == numbers[:1]).all()):  # zeros, or ones, are every bias's and norm's
        return False
    return _lends_gradient(half, weight)


def _lends_gradient(half: Tensor, weight: Tensor) -> bool:
    """Whether the weight's gradient is that of the copy, unscaled or clipped at most: another one,
    computed in half, would be rounded otherwise."""
    read = [None if t.grad is None else readable(t.grad) for t in (half, weight)]
    gradients = [evenly(g, SAMPLED).double() for g in read if g is not None]
    if len(gradients) < 2:
        return False
    a, b = (g / torch.linalg.vector_norm(g) for g in gradients)
    return bool(torch.linalg.vector_norm(a - b) < ALIKE)
