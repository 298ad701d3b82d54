"""Instrument: non-finite values that the script itself reads, and what it does about them.

A training loop that guards itself reads its loss and leaves before ``backward``::

    if not math.isfinite(loss.item()):
        sys.exit(1)          # or break, continue, assert, raise

No optimizer step shows such a value, so the read is kept as a :class:`Call` named "read" with the
bad op that the value descends from. Only a read that led somewhere counts: the loss of a batch that
never came to ``backward``, or gradients that never came to an optimizer step. A metric that is not
finite and is only printed is none.

``item()``, ``float()``, ``int()``, ``bool()`` and ``format`` reach the dispatcher; a comparison
(``loss != loss``, ``torch.isfinite(loss).all()``) marks its result, so that reading the result is
reading the value. ``tolist``, ``numpy`` and ``repr`` do not reach it and are wrapped.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.bad_ops import BadOps
from ampscope.capture.script.op_taint import FOREIGN
from ampscope.numerics.formats import dtype_name
from ampscope.observations import READ_GRADIENT, READ_LOSS, Call
from ampscope.patches import Patches
from ampscope.source_lines import SourceLines, line_name

OWN_CODE = str(Path(__file__).resolve().parents[2])
ITEM = torch.ops.aten._local_scalar_dense.default
COMPARED_MARK = "_ampscope_compared"  # on a mask or truth value: the mark of what was compared
MAX_READS = 2_000
_WRAPPED = ("tolist", "numpy", "__repr__")


class NonFiniteReads:
    """Follows non-finite values to where the script reads them. Results: :meth:`calls`."""

    def __init__(
        self, bad: BadOps, lines: SourceLines, taint_of: Callable[[Tensor], int | None]
    ) -> None:
        """``taint_of``: the id of the bad op that a non-finite tensor descends from."""
        self.forwards = 0  # training batches: calls of an outermost module with gradients on
        self._bad = bad
        self._lines = lines
        self._taint_of = taint_of
        self._backwards = 0
        self._forwards_at_backward = -1  # how many forwards there had been at the last backward
        self._backwards_at_step = 0
        self._pending: dict[tuple[str, bool], _Pending] = {}
        self._dropped: list[_Pending] = []

    def wrap(self, patches: Patches, is_watching: Callable[[], bool]) -> None:
        """Put the wrappers on; ``patches`` takes them off."""

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if is_watching() and isinstance(tensor, Tensor):
                    with own_ops():
                        self.read(tensor, None)
                return original(tensor, *args, **kwargs)

            return wrapper

        for name in _WRAPPED:
            patches.replace(torch.Tensor, name, make)

    def compared(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """An op has run: a truth value made from a non-finite one carries its mark on."""
        for out in outputs:
            if out.is_floating_point():
                continue
            mark = next((m for t in inputs if (m := _compared_mark(t)) is not None), None)
            if mark is None and out.dtype is torch.bool:
                mark = next((m for t in inputs if (m := self._mark(t)) is not None), None)
            if mark is not None:
                out.__dict__[COMPARED_MARK] = mark
            elif COMPARED_MARK in out.__dict__:  # changed in place
                del out.__dict__[COMPARED_MARK]

    def read(self, tensor: Tensor, value: Any) -> None:
        """The script reads ``tensor``; ``value`` is what it gets, None where that is not known."""
        is_bad = isinstance(value, float) and not math.isfinite(value)
        known = _compared_mark(tensor) or (self._mark(tensor, is_bad=is_bad))
        if known is None and not self._pending:
            return
        caller = sys._getframe(2)
        if caller.f_code.co_filename.startswith(OWN_CODE) and not self._lines.is_user(
            caller.f_code
        ):
            return  # ampscope's own look
        line = line_name(self._lines.where())
        for kind in (False, True):
            passed_by = self._pending.get((line, kind))
            if passed_by is None or 0 < passed_by.forwards == self.forwards:
                continue  # a line may read the values of one batch more than once
            # The loop comes round, and the last value was left behind.
            if len(self._dropped) < MAX_READS:
                self._dropped.append(passed_by)
            del self._pending[line, kind]
        if known is None or not self._matters(known):
            return
        number = value if is_bad else None
        key = line, known.is_gradient
        if key not in self._pending:
            self._pending[key] = _Pending(known, self._bad.step, line, number, self.forwards)

    def forward(self) -> None:
        """A training batch goes into an outermost module."""
        self.forwards += 1

    def backward(self) -> None:
        """The script calls backward: what it read of this batch's loss has led to no loss of it."""
        self._backwards += 1
        self._forwards_at_backward = self.forwards
        self._settle(is_gradient=False)

    def stepped(self) -> None:
        """An optimizer step ended, taken or skipped."""
        self._backwards_at_step = self._backwards
        self._settle(is_gradient=True)

    def calls(self, first: int) -> list[Call]:
        """All reads so far that led to no step, numbered from ``first``."""
        found = [*self._dropped, *self._pending.values()]
        return [
            Call(
                seq=first + number,
                step=read.step,
                name="read",
                subject=READ_GRADIENT if read.mark.is_gradient else READ_LOSS,
                value=read.value,
                dtype=read.mark.dtype,
                line=read.line,
                note=str(read.mark.taint),
            )
            for number, read in enumerate(found)
        ]

    def _settle(self, *, is_gradient: bool) -> None:
        for key in [k for k in self._pending if k[1] == is_gradient]:
            del self._pending[key]

    def _matters(self, mark: _Mark) -> bool:
        """Whether the batch that the value belongs to still waits for its backward, or step."""
        if mark.is_gradient:
            return self._backwards > self._backwards_at_step
        return self.forwards > self._forwards_at_backward or not self.forwards

    def _mark(self, tensor: Tensor, *, is_bad: bool = False) -> _Mark | None:
        """What ``tensor`` would be as something read; None for what is finite, came with the data,
        or was made without gradients, such as an evaluation's loss."""
        taint = self._taint_of(tensor)
        if taint is None and not is_bad:
            return None
        dtype = dtype_name(tensor.dtype)
        record = None if taint is None or taint < 0 else self._bad.record(taint)
        if record is None:
            return _Mark(FOREIGN, False, dtype) if tensor.requires_grad else None
        if record.phase == "backward":
            return _Mark(record.id, True, dtype)
        is_training = tensor.requires_grad or (record.grad_enabled and record.tracked)
        return _Mark(record.id, False, dtype) if is_training else None


def _compared_mark(tensor: Tensor) -> _Mark | None:
    found: _Mark | None = tensor.__dict__.get(COMPARED_MARK)
    return found


@dataclass(frozen=True, slots=True)
class _Mark:
    """A non-finite value that may be read: a loss, or (``is_gradient``) one made in backward."""

    taint: int
    is_gradient: bool
    dtype: str


@dataclass(slots=True)
class _Pending:
    """A read whose batch has come neither to ``backward`` nor to a step so far."""

    mark: _Mark
    step: int
    line: str
    value: float | None
    forwards: int  # training batches so far
