"""Instrument: gradients that the script sets or clears by its own hands.

``torch.autograd.grad`` and the transforms of ``torch.func`` hand gradients to the script and leave
``.grad`` as it is. Where an optimizer's step then takes what was handed over, that call was its
backward pass (:class:`AskedGradients`). Where the script drops ``.grad`` or fills it with zeros by
itself, that was its ``zero_grad`` (:class:`ClearedGradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import fetch, floats, has_own_memory, readable
from ampscope.capture.user_objects import parameters_of


@dataclass(frozen=True, slots=True)
class Asked:
    """One call that handed gradients over.

    ``gradients`` maps the id of each parameter to the address of its gradient (0 of one without
    memory of its own); None where functions were differentiated, whose arguments are copies of
    parameters as often as the parameters themselves. ``facts`` are the fields of the
    :class:`~ampscope.observations.Call` that a backward pass on the same output would have been;
    ``taint`` is the bad op that the output descends from.
    """

    gradients: dict[int, int] | None
    facts: dict[str, Any]
    taint: int | None

    def is_of(self, held: Iterable[int]) -> bool:
        """Whether gradients of any of the parameters with these ids were handed over."""
        return self.gradients is None or any(key in self.gradients for key in held)


MOST_COUNTED = 8  # calls of one line whose gradients are counted
MOST_ENTRIES = 30_000_000


def share_of_zeros(gradients: Iterable[Tensor | None]) -> float | None:
    """Exactly zero entries among all that one call handed over; None without any that can be read,
    and of more than :data:`MOST_ENTRIES`."""
    held = [v for g in gradients if g is not None and (v := floats(g)) is not None]
    total = sum(values.numel() for values in held)
    if not 0 < total <= MOST_ENTRIES:
        return None
    return 1.0 - sum(fetch([values.count_nonzero() for values in held])) / total


MAX_ASKED = 500  # of a script that only asks


class AskedGradients:
    """What was handed over since the last backward pass, and which of it a step takes."""

    def __init__(self) -> None:
        self._asked: list[Asked] = []
        self._filled_in = -1  # the step whose gradients a backward pass has filled
        self._calls_backward = False

    def add(self, asked: Asked) -> None:
        """The script has asked for gradients."""
        for before in self._asked:  # whose gradients are gone where new ones have their place
            for key, address in (before.gradients or {}).items():
                if address and (asked.gradients or {}).get(key) == address:
                    before.gradients[key] = 0  # type: ignore[index]  # it has this key
        self._asked.append(asked)
        del self._asked[:-MAX_ASKED]

    def drop(self, step: int) -> None:
        """A backward pass begins: what was handed over before was part of its loss."""
        self._asked.clear()
        self._calls_backward, self._filled_in = True, step

    def taken(self, parameters: Sequence[Tensor], step: int) -> list[Asked]:
        """The calls whose gradients these parameters hold now, each told once; none where a
        backward pass has filled them: what was asked for besides was for something else.

        Sums and quotients of what was handed over are other tensors. Then the calls of one line
        count, as in an accumulation; between several lines (products with a Hessian, inner steps
        of meta-learning), and in a script that calls backward as well, the gradients themselves
        must be there, or none is told.
        """
        held = {id(p): p.grad for p in parameters if p.grad is not None}
        if not self._asked or not held:
            return []
        own = [asked for asked in self._asked if asked.is_of(held)]
        self._asked = [asked for asked in self._asked if not asked.is_of(held)]
        lines = {asked.facts["line"] for asked in own}
        if step == self._filled_in:
            return []
        if len(lines) > 1 or self._calls_backward:
            places = {key: address_of(gradient) for key, gradient in held.items()}
            lines = {a.facts["line"] for a in own if _is_there(a, places)}
        return [a for a in own if a.facts["line"] in lines] if len(lines) == 1 else []


def _is_there(asked: Asked, places: dict[int, int]) -> bool:
    pairs = (asked.gradients or {}).items()
    return any(address and places.get(key) == address for key, address in pairs)


def address_of(gradient: Tensor) -> int:
    """Where its numbers are in memory; 0 where it has none of its own."""
    return gradient.data_ptr() if has_own_memory(gradient) else 0


class ClearedGradients:
    """Which optimizers held gradients after the last backward pass and hold none now."""

    def __init__(self) -> None:
        self._filled: dict[int, Optimizer] = {}

    def after_backward(self, optimizers: Iterable[Optimizer]) -> None:
        """A backward pass has ended."""
        for optimizer in optimizers:
            if any(p.grad is not None for p in parameters_of(optimizer)):
                self._filled[id(optimizer)] = optimizer

    def emptied(self, parameters: Sequence[Tensor]) -> None:
        """``zero_grad`` has cleared the gradients of these parameters."""
        own = {id(p) for p in parameters}
        for key, optimizer in list(self._filled.items()):
            if any(id(p) in own for p in parameters_of(optimizer)):
                del self._filled[key]

    def found(self, report: Callable[[Optimizer], None]) -> None:
        """A backward pass begins: ``report`` gets each optimizer whose gradients are gone."""
        for key, optimizer in list(self._filled.items()):
            gradients = (p.grad for p in parameters_of(optimizer))
            with own_ops():
                is_clear = not any(_holds_something(g) for g in gradients if g is not None)
            if is_clear:
                del self._filled[key]
                report(optimizer)


def _holds_something(gradient: Tensor) -> bool:
    values = readable(gradient)
    return values is None or bool(values.any())
