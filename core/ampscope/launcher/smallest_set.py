"""The smallest set of modules that must stay in fp32, or uncompiled: delta debugging.

Each candidate is a real run, so runs are what counts. One needed module is found by bisection
(the shortest prefix of the candidates that cures ends in it), is fixed, and the search goes on
in front of it: 1 + k (log2 n + 1) runs at most for k of n modules, where ddmin (Zeller and
Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002) takes up to n^2 + 3 n.
Bisection relies on more fp32 (more eager code) never hurting (Junker, "QuickXplain", 2004); the
result is then 1-minimal: leaving out any one module brings the fault back. Whatever holds, the
set returned is one that was seen to cure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence


class _OutOfRunsError(Exception):
    pass


def smallest_set(
    names: Sequence[str],
    cures: Callable[[tuple[str, ...]], bool],
    max_runs: int,
    *,
    likely_first: bool = False,
) -> tuple[str, ...] | None:
    """A minimal subset of ``names`` for which ``cures`` is true; None when all of them do not.

    After ``max_runs`` runs it is the smallest subset that was seen to cure. ``likely_first``: the
    names stand in the order of suspicion, so the first is tried alone, and short prefixes are
    preferred to long ones.
    """
    known: dict[tuple[str, ...], bool] = {}

    def ask(candidate: Iterable[str]) -> bool:
        wanted = set(candidate)
        asked = tuple(n for n in names if n in wanted)
        if asked not in known:
            if len(known) >= max_runs:
                raise _OutOfRunsError
            known[asked] = cures(asked)
        return known[asked]

    needed: list[str] = []
    left = list(names)
    try:
        if likely_first and left and ask(left[:1]):
            return tuple(left[:1])
        if not left or not ask(left):
            return None
        while not needed or not ask(needed):
            end = _shortest_prefix(
                left, lambda prefix: ask([*needed, *prefix]), likely_first=likely_first
            )
            needed.append(left[end - 1])
            left = left[: end - 1]
            if not left:
                break
    except _OutOfRunsError:
        pass
    cured = [asked for asked, good in known.items() if good]
    return min(cured, key=len, default=None)


def _shortest_prefix(
    names: list[str], cures: Callable[[list[str]], bool], *, likely_first: bool
) -> int:
    """Length of the shortest prefix that cures; all of ``names`` do, and none of them does not."""
    fails, works = 0, len(names)
    while works - fails > 1:
        middle = (fails + works) // 2
        if likely_first:  # the geometric mean
            middle = min(max(math.isqrt(max(fails, 1) * works), fails + 1), works - 1)
        if cures(names[:middle]):
            works = middle
        else:
            fails = middle
    return works
