"""Instrument: how much a running sum in half precision has lost so far: rounding errors added up.

A single addition to a half-precision total is off by at most half an ulp, and errors of both signs
cancel. When the terms are below half an ulp of the total, every error has the sign of the term, and
their sum grows without bound: fp16 stops counting at 2,048, bf16 at 256.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.script.op_taint import producers
from ampscope.capture.tensors import HALF

IN_PLACE = ("add_", "sub_", "index_add_", "scatter_add_", "_index_put_impl_", "index_put_")
MAX_NUMEL = 1 << 20
MAX_SUMS = 200  # lines of a script that add up something; more are not followed
MAX_TOTALS = 64  # of one line and shape, as of a loop over the parameters
STARTS_ANEW = 0.5  # of the last total; a moving average keeps more than half of itself
TOUCHED = 0.05  # share of a sum's elements that must be off: one outlier is no pattern
_SCALED = (("mul",), ("mul_",), ("div",), ("div_",))
_AVERAGES = (("add",), ("lerp",), ("sub",))  # what a copied average was made by


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
