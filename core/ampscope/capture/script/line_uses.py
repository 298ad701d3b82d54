"""Instrument: which dtypes each line of the script computes in, and what its casts lose.

In the first steps every op is counted for the innermost line of the user's own code that called
it; an op of the backward pass for the line of its forward op. The text of those files is kept with
it, as it was then.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.op_facts import tensors
from ampscope.capture.tensors import holds_numbers, in_backward, plain
from ampscope.masks import masked_source
from ampscope.numerics.formats import dtype_name
from ampscope.observations import LineUse, SourceText
from ampscope.source_lines import line_name

STEPS = 2  # first optimizer steps that are counted
MOST_USES = 20_000
MOST_FILES, MOST_LINES = 12, 5_000  # that are kept
_CASTS = frozenset({"_to_copy", "copy_"})

Place = tuple[str, int]


class _Key(NamedTuple):
    place: Place
    backward: bool
    op: str
    takes: tuple[str, ...]
    makes: str


class LineUses:
    """Counts what it is shown; :meth:`records` gives the result."""

    def __init__(self, place: Callable[[], Place]) -> None:
        """``place`` says where the op that has just run belongs, ("", 0) for nowhere."""
        self._place = place
        self._calls: Counter[_Key] = Counter()
        self._nonzero: Counter[_Key] = Counter()  # elements that casts took
        self._lost: Counter[_Key] = Counter()  # of them, those that became zero

    def record(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """One op that has run; ops without floating-point numbers are left out."""
        place = self._place()
        given, made = _floating(tensors(args, kwargs)), _floating(tensors(out, None))
        if not place[0] or not (given or made) or len(self._calls) >= MOST_USES:
            return
        takes = tuple(dict.fromkeys(dtype_name(t.dtype) for t in given))
        makes = dtype_name(made[0].dtype) if made else ""
        key = _Key(place, in_backward(), str(func._opname), takes, makes)
        self._calls[key] += 1
        if (
            key.op in _CASTS
            and made
            and given
            and given[-1].dtype.itemsize > made[0].dtype.itemsize
        ):
            self._count_lost(key, given[-1], made[0])

    def _count_lost(self, key: _Key, before: Tensor, after: Tensor) -> None:
        if before.shape != after.shape or not (holds_numbers(before) and holds_numbers(after)):
            return
        with own_ops():
            was, now = plain(before).count_nonzero(), plain(after).count_nonzero()
            self._nonzero[key] += int(was)
            self._lost[key] += int(was) - int(now)

    def records(self, more: Sequence[str] = ()) -> list[LineUse | SourceText]:
        """A record for each line, op and dtypes in the order of their first call, and the texts of
        the files in which most of them are, and of ``more``."""
        uses = [
            LineUse(
                line=line_name(key.place),
                op=key.op,
                takes=key.takes,
                makes=key.makes,
                backward=key.backward,
                calls=calls,
                cast=self._nonzero[key],
                lost=self._lost[key],
            )
            for key, calls in self._calls.items()
        ]
        by_file = Counter(key.place[0] for key in self._calls)
        by_file.update(more)
        texts = [_text(file) for file, _ in by_file.most_common(MOST_FILES)]
        return [*uses, *texts]


def _floating(found: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in found if t.is_floating_point()]


def _text(file: str) -> SourceText:
    lines = [line.rstrip() for line in linecache.getlines(file)]
    if len(lines) > MOST_LINES:  # what is cut can be no program, whose secrets are found
        lines = masked_source("\n".join(lines)).split("\n")[:MOST_LINES]
    return SourceText(line_name((file, 1)).rpartition(":")[0], tuple(lines))
