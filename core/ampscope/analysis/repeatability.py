"""Does a script do the same twice? Two runs of it are compared before precision can matter.

ampscope seeds torch, NumPy and ``random``; a script still differs from run to run when it seeds
from the clock or has a generator of its own. Losses of such runs cannot be compared step by step.
"""

from __future__ import annotations

import math

from ampscope.analysis.run_view import RunView
from ampscope.observations import Call, Scan


def difference(first: RunView, second: RunView) -> str:
    """What two runs of one script do not have in common before the first step; "" when all is.

    Precision cannot be the reason: only what is fp32 in both runs is compared.
    """
    pairs = zip(_starts(first), _starts(second), strict=False)
    if any(a.name == b.name and _facts(a) != _facts(b) for a, b in pairs if _comparable(a, b)):
        return "the initial weights"
    a, b = _first_inputs(first), _first_inputs(second)
    if a is not None and b is not None and a.dtype == b.dtype == "fp32" and not _is_same(a, b):
        return "the first inputs"
    return ""


def draws_otherwise(first: RunView, second: RunView) -> bool:
    """Whether weights or inputs have another dtype in the two runs.

    torch draws other random numbers in bf16 than in fp32, so what is drawn after them differs
    though the script is seeded.
    """
    pairs = zip(_starts(first), _starts(second), strict=False)
    a, b = _first_inputs(first), _first_inputs(second)
    inputs = a is not None and b is not None and a.dtype != b.dtype
    return inputs or any(a.name == b.name and a.dtype != b.dtype for a, b in pairs)


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
