"""Instrument: differences of numbers that agree so closely that their rounding is all that is left.

``elu(x) + 1`` at -9 is 1.2e-4. In bf16 elu(-9) is -1, and the sum is exactly 0. The addition itself
is exact: what is lost was rounded off before, where it was small beside the number that it was part
of. So the ops of a step whose results are rounded to half are kept with their inputs, and where a
sum is much smaller than its terms, these are computed again in fp32.

Not a cancellation, although the result is as far off: terms that were wrong themselves (a stalled
sum, an earlier cancellation), a term whose making is not known, and a difference that in fp32 is
nothing but rounding as well, as that of two equal numbers is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.script import op_facts
from ampscope.capture.script.op_facts import OpCall
from ampscope.capture.script.op_taint import MADE, PASSES_ON, is_learned, is_parameter
from ampscope.capture.tensors import HALF, all_finite, holds_numbers, version

FIRST_STEPS = 3  # all of them are looked at; later ones at powers of two
LOOKS = 6  # at one line; half of them at one step
LINES = 64  # at which terms were computed again
MAX_NUMEL = 1 << 22  # of one result, and of what it was made of besides parameters
MAX_KEPT = 1 << 25  # elements of these that are held at a time
DEPTH = 10  # ops looked back
SMALL = 1 / 16  # of its larger term: a result below it may have lost most of its digits
AGREE = 8.0  # roundings of the larger term: terms whose exact difference is smaller agree closely
ROUNDED = 4.0  # roundings by which a term may itself be off
IN_FP32 = 2.0**-18  # of the larger term: a smaller difference is rounding in fp32 as well
WRONG = 0.3  # of one exact element
MATTERS = 0.3  # of the exact result's norm; or
SHARE = 1 / 3  # of the elements
_SIGNS = {"add": 1.0, "add_": 1.0, "sub": -1.0, "sub_": -1.0, "rsub": -1.0}
# What is computed of a model's inputs and weights, as they were rounded: the chain begins here.
_HEAVY = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "mkldnn_convolution",
    "native_layer_norm", "native_group_norm", "native_batch_norm", "mkldnn_linear", "linear",
})  # fmt: skip
_CASTS = PASSES_ON | {"_to_copy"}


class Cancelled(NamedTuple):
    """What a difference has lost."""

    error: float  # relative to the fp32 result, in 2-norms
    share: float  # of the elements that are off by more than :data:`WRONG` of their exact value
    largest: float  # magnitude of the exact result
    places: tuple[tuple[str, int], ...]  # besides the op's own, whose roundings it magnified


class _Made(NamedTuple):
    func: Any
    args: Any
    kwargs: Any
    parents: dict[int, int]  # by the id of one of the tensors among the arguments
    versions: tuple[tuple[Tensor, int], ...]
    depth: int
    is_cast: bool  # nothing but casts and views led here
    place: tuple[str, int]
    numel: int


class Cancellations:
    """Keeps how the results of the current step were made; :meth:`lost` judges a difference."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}  # the oldest first
        self._number = 0
        self._kept = 0
        self._step = 0
        self._looks: Counter[tuple[str, int]] = Counter()
        self._looks_now: Counter[tuple[str, int]] = Counter()

    @property
    def looks(self) -> bool:
        """Whether this step is looked at."""
        return self._step < FIRST_STEPS or self._step & (self._step - 1) == 0

    def new_step(self, step: int) -> None:
        """What the last step made is forgotten."""
        self._made.clear()
        self._looks_now.clear()
        self._kept, self._step = 0, step

    def keep(self, call: OpCall, result: Any, place: Callable[[], tuple[str, int]]) -> None:
        """Remember how ``result`` was made, where half precision had a part in it. ``place`` gives
        the file and line of the script that the op belongs to."""
        out = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(out, Tensor) or not out.is_floating_point() or call.name.endswith("_"):
            return
        known = {id(t): n for t in call.tensors if (n := self._number_of(t)) is not None}
        is_half = out.dtype in HALF or any(t.dtype in HALF for t in call.tensors)
        if not (known or is_half) or not out.numel() or out.is_sparse:
            return
        if torch.Tag.nondeterministic_seeded in call.func.tags:
            return
        # The script may be about to let go of any of them; a result may be much smaller.
        sizes = [out.numel(), *(t.numel() for t in call.tensors if not is_parameter(t))]
        if max(sizes) > MAX_NUMEL:
            return
        made = {key: self._made[number] for key, number in known.items()}
        if call.name in _HEAVY:
            made = {key: one for key, one in made.items() if one.is_cast}
        made = {key: one for key, one in made.items() if one.depth < DEPTH}
        parents: dict[int, int] = {}
        kept: list[tuple[Tensor, int]] = []
        numbers = {key: known[key] for key in made}
        args = tuple(_held(a, numbers, parents, kept) for a in call.args)
        kwargs = {k: _held(v, numbers, parents, kept) for k, v in call.kwargs.items()}
        depth = 1 + max((one.depth for one in made.values()), default=0)
        is_cast = call.name in _CASTS and len(made) == len(known)
        is_cast = is_cast and all(one.is_cast for one in made.values())
        if call.name in PASSES_ON:
            depth -= 1
        _held(out, {}, parents, kept)  # what is written into it later was not made so
        self._number += 1
        self._made[self._number] = _Made(
            call.func, args, kwargs, parents, tuple(kept), depth, is_cast, place(), sum(sizes)
        )
        out.__dict__[MADE] = self._number
        self._kept += sum(sizes)
        while self._kept > MAX_KEPT:
            self._kept -= self._made.pop(next(iter(self._made))).numel

    def lost(
        self, call: OpCall, out: Any, place: Callable[[], tuple[str, int]]
    ) -> Cancelled | None:
        """What the sum or difference ``out`` has lost to the rounding of its terms; None where it
        is no cancellation, or little of it is."""
        terms = _terms(call)
        if terms is None or not isinstance(out, Tensor) or not 0 < out.numel() <= MAX_NUMEL:
            return None
        first, second, factor = terms
        given = [t for t in (first, second) if isinstance(t, Tensor)]
        if not any(self._number_of(t) is not None for t in given):
            return None
        size = torch.maximum(_magnitude(first, out), _magnitude(second, out) * abs(factor))
        if float(((out.abs() < SMALL * size) & (size > 0)).float().mean()) < SHARE / 4:
            return None
        line = place()
        if self._looks[line] >= LOOKS or self._looks_now[line] >= LOOKS // 2:
            return None
        if not line[0] or (line not in self._looks and len(self._looks) >= LINES):
            return None
        self._looks[line] += 1
        self._looks_now[line] += 1
        return self._judged(first, second, factor, out, line)

    def _judged(
        self, first: Any, second: Any, factor: float, out: Tensor, place: tuple[str, int]
    ) -> Cancelled | None:
        if self._is_unknown(first, second) or self._is_unknown(second, first):
            return None
        places: Counter[tuple[str, int]] = Counter()
        a, b = (self._exact(t, {}, places) for t in (first, second))
        exact = _sum(a, b, factor, out)
        if exact is None:
            return None
        size = torch.maximum(_magnitude(a, out), _magnitude(b, out) * abs(factor))
        unit = max(_unit(t, self) for t in (first, second))
        is_there = (exact.abs() > IN_FP32 * size) & (exact.abs() > torch.finfo(out.dtype).tiny)
        agree = is_there & (exact.abs() < AGREE * unit * size)
        for value, term in ((a, first), (b, second)):
            off = (_wide(value) - _wide(term)).abs() if isinstance(term, Tensor) else 0.0
            agree &= off <= ROUNDED * unit * size
        wrong = agree & ((out.float() - exact).abs() > WRONG * exact.abs())
        share = float(wrong.float().mean())
        length = float(torch.linalg.vector_norm(exact))
        lost = float(torch.linalg.vector_norm((out.float() - exact) * wrong))
        error = lost / length if length else 0.0
        if not math.isfinite(error) or (share <= SHARE and error <= MATTERS):
            return None
        near_a, near_b = (self._exact(t, {}, Counter(), place) for t in (first, second))
        own = _sum(near_a, near_b, factor, out)
        near = None if own is None else torch.linalg.vector_norm((own - exact) * wrong)
        whole = float(torch.linalg.vector_norm(exact * wrong))
        if near is not None and float(near) <= WRONG * whole:
            places.clear()  # to lift the op's own line is enough
        others = tuple(p for p in places if p != place and p[0])
        return Cancelled(error, share, float(exact.abs().max()), others)

    def _is_unknown(self, term: Any, other: Any) -> bool:
        """Whether how far ``term`` was rounded cannot be told: the model made it, half precision
        holds it, and no op is known that did; unless ``other`` was made of the very same."""
        if not isinstance(term, Tensor) or self._number_of(term) is not None:
            return False
        if term.dtype not in HALF or is_parameter(term) or not is_learned(term):
            return False
        return not self._leads_to(other, term)

    def _leads_to(self, term: Any, leaf: Tensor) -> bool:
        number = self._number_of(term) if isinstance(term, Tensor) else None
        waiting, seen = [number], set()
        while waiting:
            made = self._made.get(waiting.pop() or 0)
            if made is None or id(made) in seen:
                continue
            seen.add(id(made))
            if any(t.data_ptr() == leaf.data_ptr() for t, _ in made.versions):
                return True
            waiting += made.parents.values()
        return False

    def _exact(
        self, term: Any, known: dict[int, Tensor | None], places: Counter[tuple[str, int]],
        only: tuple[str, int] | None = None,
    ) -> Any:  # fmt: skip
        """The term in fp32, from the ops that made it; those of line ``only``, if it is given."""
        number = self._number_of(term) if isinstance(term, Tensor) else None
        found = None if number is None else self._remade(number, known, places, only)
        return term if found is None else found

    def _remade(
        self, number: int, known: dict[int, Tensor | None], places: Counter[tuple[str, int]],
        only: tuple[str, int] | None,
    ) -> Tensor | None:  # fmt: skip
        if number in known:
            return known[number]
        known[number] = None
        made = self._made.get(number)
        if made is None or any(version(t) != then for t, then in made.versions):
            return None
        if not all(holds_numbers(t) for t, _ in made.versions):  # a storage that was freed since
            return None
        if only is not None and made.place != only and made.func._opname not in _CASTS:
            return None
        instead = {
            key: found
            for key, parent in made.parents.items()
            if (found := self._remade(parent, known, places, only)) is not None
        }
        known[number] = op_facts.in_fp32(made.func, made.args, made.kwargs, instead)
        if known[number] is not None and made.func._opname not in PASSES_ON:
            places[made.place] += 1
        return known[number]

    def _number_of(self, tensor: Tensor) -> int | None:
        number: int | None = tensor.__dict__.get(MADE)
        return number if number in self._made else None

    def is_half(self, tensor: Tensor) -> torch.dtype | None:
        """The half format in which ``tensor``, or what it was made of, was rounded."""
        if tensor.dtype in HALF:
            return tensor.dtype
        waiting, seen = [self._number_of(tensor)], 0
        while waiting and seen < 4 * DEPTH:
            made = self._made.get(waiting.pop() or 0)
            seen += 1
            for kept, _ in made.versions if made is not None else ():
                if kept.dtype in HALF:
                    return kept.dtype
            waiting += made.parents.values() if made is not None else ()
        return None


def _held(
    value: Any, numbers: dict[int, int], parents: dict[int, int], kept: list[tuple[Tensor, int]]
) -> Any:
    """``value`` with other tensors of the same numbers. No function inside :meth:`keep`: one that
    calls itself would hold them until the next garbage collection."""
    if isinstance(value, list | tuple):
        return type(value)(_held(v, numbers, parents, kept) for v in value)
    if not isinstance(value, Tensor):
        return value
    alias = value.detach()  # holds the numbers, and not the graph that made them
    kept.append((alias, version(alias)))
    if id(value) in numbers:
        parents[id(alias)] = numbers[id(value)]
    return alias


def _terms(call: OpCall) -> tuple[Any, Any, float] | None:
    """(first, second, factor of the second); None of an op that is no sum of two."""
    sign = _SIGNS.get(call.name)
    if sign is None or len(call.args) < 2:
        return None
    alpha = call.args[2] if len(call.args) > 2 else call.kwargs.get("alpha", 1)
    first, second = call.args[:2]
    if call.name == "rsub":
        first, second = second, first
    elif call.name.endswith("_"):
        return None  # the first term is gone
    if not isinstance(alpha, int | float):
        return None
    return first, second, sign * float(alpha)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else float(value)


def _magnitude(value: Any, out: Tensor) -> Tensor:
    wide = _wide(value)
    if isinstance(wide, Tensor):
        return wide.abs()
    return torch.full((), abs(wide), device=out.device)


def _sum(a: Any, b: Any, factor: float, out: Tensor) -> Tensor | None:
    exact = _wide(a) + factor * _wide(b)
    if not isinstance(exact, Tensor) or exact.shape != out.shape or not all_finite(exact):
        return None
    return exact


def _unit(term: Any, of: Cancellations) -> float:
    """Half a spacing at 1 of the half format that ``term`` was rounded to; 0 where none was."""
    dtype = of.is_half(term) if isinstance(term, Tensor) else None
    return 0.0 if dtype is None else torch.finfo(dtype).eps / 2
