"""Instrument: what the script itself did to scaled gradients between backward and ``unscale_``.

The gradients are copied at the end of a scaled backward and compared at the first ``unscale_`` of
their optimizer, the script's own or the one inside ``scaler.step``. Clipping without torch's
functions shows here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._mode_utils import no_dispatch

from ampscope.capture.script.change_kind import Pair, change_kind
from ampscope.capture.script.optimizer_facts import parameters_of
from ampscope.capture.script.write_lines import WriteLines
from ampscope.capture.tensors import has_own_memory
from ampscope.gradient_change import GradientChange

MAX_CHANGES = 64  # enough to see a limit that stays while the norm moves
MAX_NUMEL = 30_000_000  # gradients copied: 120 MB in fp32


class GradientChanges:
    """Collects :class:`GradientChange` records; ``writes`` says which line wrote a tensor."""

    def __init__(self, writes: WriteLines) -> None:
        self.records: list[GradientChange] = []
        self._writes = writes
        self._copies: dict[int, Tensor] = {}  # id of a parameter -> its gradient after backward

    def before_backward(self) -> None:
        """A backward is about to add to the gradients: what was copied is out of date."""
        self._copies.clear()
        self._writes.stop()

    def after_backward(self, optimizers: list[Optimizer]) -> None:
        """A backward of a scaled loss has ended."""
        parameters = {id(p): p for o in optimizers for p in parameters_of(o)}
        small = sum(p.numel() for p in parameters.values()) <= MAX_NUMEL
        if not small or len(self.records) >= MAX_CHANGES:
            return
        with no_dispatch():
            for key, p in parameters.items():
                if p.grad is not None and _is_comparable(p.grad):
                    self._copies[key] = p.grad.detach().clone()
        self._writes.start()

    def before_unscale(
        self, optimizer: Optimizer, name: str, scale_of: Callable[[], float], attempt: int
    ) -> None:
        """Compare the optimizer's gradients, once a backward."""
        own = [(p, self._copies.pop(id(p), None)) for p in parameters_of(optimizer)]
        if not self._copies:
            self._writes.stop()
        with no_dispatch():
            changed = [
                (copy, p.grad.detach())
                for p, copy in own
                if copy is not None and p.grad is not None and _differs(copy, p.grad.detach())
            ]
            if not changed or not all(_is_usable(pair) for pair in changed):
                return
            facts = dataclasses.asdict(change_kind(changed))
        self.records.append(
            GradientChange(
                attempt=attempt,
                optimizer=name,
                scale=scale_of(),
                changed=len(changed),
                line=self._writes.line_of([after for _, after in changed]),
                **facts,
            )
        )


def _is_comparable(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and has_own_memory(gradient)


def _differs(before: Tensor, after: Tensor) -> bool:
    """Changed, and not merely emptied for the next step."""
    same_kind = _is_comparable(after) and before.shape == after.shape
    return same_kind and not torch.equal(before, after) and bool(after.any())


def _is_usable(pair: Pair) -> bool:
    """An overflowed gradient says nothing about a factor."""
    return all(bool(torch.isfinite(gradient).all()) for gradient in pair)
