"""Do two runs begin alike, and does a script do the same twice?

ampscope seeds torch, NumPy and ``random``; a script still differs from run to run when it seeds
from the clock or has a generator of its own. Losses of such runs cannot be compared step by step.
Only two runs in the same precision tell that. A script and its fp32 control may begin unlike each
other because half precision has changed the weights or the data before the first step: that is
evidence, and the unchanged script has to run once more to tell the one from the other.
"""

from __future__ import annotations

import math
import statistics

from ampscope.analysis.run_view import TAIL_SHARE, RunView
from ampscope.observations import Call, Scan

EARLY_LOSSES = 10  # of the first steps, before a GPU's order of additions can grow
SAME_LOSS = 0.01  # relative
FLOOR = 3.0  # one run tells the size of a random distance, and not its extremes


def difference(first: RunView, second: RunView) -> str:
    """What two runs of one script do not have in common before the first step; "" when all is.

    Only what is fp32 in both runs is compared. What the script computed in half precision before
    may stand in it all the same: weights that it prepared, inputs that a half model made.
    """
    pairs = zip(_starts(first), _starts(second), strict=False)
    if any(a.name == b.name and _facts(a) != _facts(b) for a, b in pairs if _comparable(a, b)):
        return "the initial weights"
    a, b = _first_inputs(first), _first_inputs(second)
    if a is not None and b is not None and a.dtype == b.dtype == "fp32" and not _is_same(a, b):
        return "the first inputs"
    return ""


def is_reproducible(first: RunView, second: RunView) -> bool:
    """Whether two runs of the script in the same precision are the same run: they begin alike, and
    so do their first losses, but for the order in which a GPU adds."""
    if difference(first, second):
        return False
    pairs = zip(first.losses[:EARLY_LOSSES], second.losses[:EARLY_LOSSES], strict=False)
    return all(_is_near(a, b) for a, b in pairs)


def wants_repeat(run: RunView, fp32: RunView) -> bool:
    """Whether the unchanged script has to run once more before its beginning, which is not the fp32
    control's, can be laid to chance or to half precision. Random numbers that torch draws in
    another dtype are neither."""
    return run.repeat is None and bool(difference(run, fp32)) and not draws_otherwise(run, fp32)


def incomparable(run: RunView, fp32: RunView) -> str:
    """What keeps the course of ``run`` from being judged by that of its fp32 control: what chance
    made different at their beginning. "" where they begin alike, and where the unchanged script ran
    twice and reproduced itself, so that its precision makes the difference."""
    what = difference(run, fp32)
    is_known = what and run.repeat is not None and is_reproducible(run, run.repeat)
    return "" if is_known else what


def beyond_floor(run: RunView, fp32: RunView, other: RunView) -> bool | None:
    """Whether the last losses of ``run`` are above fp32's by more than chance explains: by more
    than :data:`FLOOR` times the distance of ``other`` from fp32. ``other`` is the fp32 control with
    one input moved a little, or, of a script whose order is not fixed, a second run in the
    same precision. Means over the last fifth of what all three made. None where there are no losses
    of all three, or not finite ones.

    Of losses 0.30 in half, 0.20 in fp32 and 0.21 in the moved run the surplus is 0.10 and the floor
    0.01: beyond it. Half precision rounds at every step, and not once: in a training that forgets a
    disturbance a harmless run is beyond the floor, too. Within it there is no harm; beyond it there
    may be.
    """
    runs = (run, fp32, other)
    count = min(len(r.losses) for r in runs)
    tails = [r.losses[count - max(1, int(count * TAIL_SHARE)) : count] for r in runs]
    if not count or not all(math.isfinite(x) for tail in tails for x in tail):
        return None
    surplus = statistics.fmean(a - b for a, b in zip(tails[0], tails[1], strict=True))
    chance = statistics.fmean(abs(a - b) for a, b in zip(tails[2], tails[1], strict=True))
    return surplus > FLOOR * chance


def draws_otherwise(first: RunView, second: RunView) -> bool:
    """Whether weights or inputs have another dtype in the two runs.

    torch draws other random numbers in bf16 than in fp32, so what is drawn after them differs
    though the script is seeded.
    """
    pairs = zip(_starts(first), _starts(second), strict=False)
    a, b = _first_inputs(first), _first_inputs(second)
    inputs = a is not None and b is not None and a.dtype != b.dtype
    return inputs or any(a.name == b.name and a.dtype != b.dtype for a, b in pairs)


def _is_near(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= SAME_LOSS * max(abs(a), abs(b)) or (a != a and b != b)


def _starts(view: RunView) -> list[Scan]:
    first = [s for s in view.scans if s.moment == "start" and s.step == 0]
    if view.outcome.framework == "torch":
        return first
    # Layers of Keras and Paddle are first seen after a call, which has moved BatchNorm's averages.
    return [s for s in first if s.kind == "parameter"]


def _first_inputs(run: RunView) -> Call | None:
    return next((call for call in run.calls if call.name == "inputs"), None)


def _comparable(a: Scan, b: Scan) -> bool:
    return a.dtype == b.dtype == "fp32" and a.total == b.total


def _facts(scan: Scan) -> tuple[str, ...]:
    return tuple(map(str, (scan.max_abs, scan.std)))  # as text, NaN equals itself


def _is_same(a: Call, b: Call) -> bool:
    """Two sums are equal, or both are NaN, which is equal to nothing."""
    return a.value == b.value or all(c.value is not None and math.isnan(c.value) for c in (a, b))
