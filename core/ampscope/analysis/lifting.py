"""What is lifted to fp32, and in which order, to find the site of half precision that harms.

A *site* is a place where numbers become half (:class:`~ampscope.observations.HalfSite`). Lifting
one leaves all other rounding of the script as it is: a line's torch calls, and what it makes or
loads, in fp32; or parameters; or an optimizer's state. Those come first that were seen to lose what
their input had: numbers that became zero or infinite or fell onto one another, sums that stand
still, results far from fp32's of the same inputs. No cause is known here by name.

    candidates(run)            ["prepare.py:15", "train.py:41", "fp32_params"]
    lift(["prepare.py:15"])    "fp32_lines:prepare.py:15"
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.healing import heals
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom
from ampscope.control import Control
from ampscope.observations import BadOp, HalfSite

LIFTS = frozenset({"fp32_lines", "fp32_modules", "fp32_params", "fp32_state"})  # of Control's names
_PARTS = {"weights": "fp32_params", "moments": "fp32_state"}  # role -> what lifts all of them
_HALF = ("fp16", "bf16")
OF_DTYPES = frozenset({Symptom.ENDED, Symptom.EXCEPTION, Symptom.CAUGHT})
# A relative distance. bf16 rounds to 0.002; healthy chains of a hundred ops stay below 0.05.
MATERIAL = 0.1
FEW, FEW_OF = 32, 4_096  # different numbers left, of so many; bf16 leaves a thousand of normal ones
FEW_SHARE = 0.125  # of the different ones before
LATE = 0.5  # the suspicion of a site that was first seen behind the first step
PARTED = 0.9  # the suspicion of the first line that parts; a site that loses everything is at 1


def candidates(
    run: RunView, control: RunView | None = None, *, only_results: bool = False
) -> list[str]:
    """What can be lifted of a baseline run, most suspicious first: lines ("train.py:41"), and
    ``fp32_params`` or ``fp32_state`` where it has parameters or moments in half. ``control``: the
    fp32 control; the lines at which the numbers of both part first are the more suspicious.
    ``only_results``: the losses are the control's, and what is reported is not; what takes no part
    in the first steps is the more suspicious, as a sum of an evaluation."""
    order: dict[str, float] = {}
    for site in run.sites:
        if site.line:
            is_late = only_results and site.step > 0
            order[site.line] = max(order.get(site.line, 0.0), lost(site), LATE * is_late)
        if part := _part(site):
            order[part] = max(order.get(part, 0.0), lost(site))
    for use in run.line_uses:
        if not use.backward and use.makes in _HALF and use.line:
            share = use.lost / use.cast if use.cast else 0.0
            order[use.line] = max(order.get(use.line, 0.0), share)
    for op in run.bad_ops:
        if op.line and (op.dtype in _HALF or any(o.dtype in _HALF for o in op.inputs)):
            order[op.line] = max(order.get(op.line, 0.0), _lost_by(op))
    # Where no half is made, a line only shows what an earlier one has done.
    lines = [line for line in parted(run, control) if line in order] if control is not None else []
    for place, line in enumerate(lines):
        order[line] = max(order[line], PARTED / (1 + place))
    if run.outcome.uses_half_model:
        order.setdefault("fp32_params", 0.0)
    if any({"fp16", "bf16"} & {*a.state_dtypes.split("+")} for a in run.steps):
        order.setdefault("fp32_state", 0.0)
    return sorted(order, key=order.__getitem__, reverse=True)  # else as they were seen first


def parted(run: RunView, control: RunView) -> list[str]:
    """The lines whose results differ from the control's by more than rounding gives
    (:data:`MATERIAL`), in the order in which they ran: before the training, and in the first
    step, to which both come with the same weights."""
    other = dict(_held(control))
    found: dict[str, None] = {}
    for key, (norm, sketch) in _held(run):
        if key in other and key[0] not in found:
            reference, its_sketch = other[key]
            apart = math.dist(sketch, its_sketch) if len(sketch) == len(its_sketch) else math.inf
            if apart > MATERIAL * max(norm, reference):
                found[key[0]] = None
    return list(found)


_Result = tuple[tuple[str, str, int], tuple[float, tuple[float, ...]]]


def _held(run: RunView) -> Iterator[_Result]:
    """Line, op and which of its calls; norm and sketch of what it made."""
    seen: Counter[tuple[str, str]] = Counter()
    for record in run.line_digests:
        for op, line, norm, sketch in zip(
            record.names, record.lines, record.norms, record.sketches, strict=False
        ):
            seen[line, op] += 1
            yield (line, op, seen[line, op]), (norm, unpacked(sketch))


def unpacked(sketch: str) -> tuple[float, ...]:
    """The sums of a stored sketch; none of a damaged one."""
    try:
        packed = base64.b64decode(sketch, validate=True)
        return struct.unpack(f"<{len(packed) // 8}d", packed)
    except (ValueError, struct.error):  # of an imported run
        return ()


def lost(site: HalfSite) -> float:
    """How much of what a site was given is gone behind it, from 0 to 1; what rounding alone takes
    is nothing."""
    if not site.elements:
        return 0.0
    gone = (site.zeroed + site.infinite) / site.elements
    falls = few_are_left(site) or (site.whole and site.distinct)
    fell = site.merged / site.distinct if falls else 0.0
    moved = site.changed / site.elements if site.whole else 0.0
    return min(max(gone, fell, moved), 1.0)


def few_are_left(site: HalfSite) -> bool:
    """Whether many different numbers became few: they are close to one another beside their size,
    as pressures around 1013 are. Rounding leaves some hundred of numbers around 0 or 1."""
    left = site.distinct - site.merged
    most = FEW * max(site.elements / FEW_OF, 1.0)
    return 0 < left <= most and left <= FEW_SHARE * site.distinct


def _lost_by(op: BadOp) -> float:
    if op.kind == "nonfinite":
        return 1.0 if op.fp32_finite else 0.0
    return min(op.error or 0.0, 1.0)


def _part(site: HalfSite) -> str:
    if site.kind in ("module", "made", "cast", "loaded", "state"):
        return _PARTS.get(site.role, "")
    return ""


def lift(chosen: Iterable[str]) -> Control:
    """The control that lifts these of :func:`candidates`."""
    wanted = list(chosen)
    parts = [name for name in wanted if name in LIFTS]
    lines = tuple(name for name in wanted if name not in LIFTS)
    return Control.of(*parts, fp32_lines=lines) if lines else Control.of(*parts)


def lifted(control: str) -> tuple[str, ...]:
    """What of :func:`candidates` a control lifts, and modules; nothing where it changes more."""
    parts = Control(control).parts
    if not parts or not {part.name for part in parts} <= LIFTS:
        return ()
    return tuple(v for part in parts for v in (part.values if part.value else (part.name,)))


def smallest_lift(evidence: Evidence) -> str | None:
    """Of the runs with something lifted the one that lifts least and in which what is wrong with
    the script is gone; None where none is. Only where the fp32 control trains and the baseline
    does not."""
    if not can_be_lifted(evidence):
        return None
    healed = [
        name
        for name, run in evidence.runs.items()
        if lifted(name) and not run.outcome.is_out_of_memory and heals(run, evidence) is not False
    ]
    return min(healed, key=lambda name: len(lifted(name)), default=None)


def can_be_lifted(evidence: Evidence) -> bool:
    """Whether lifting can show anything: something is wrong with numbers that the fp32 control does
    not have. A script that only ends or raises may do so at a dtype, which lifting changes."""
    return bool(evidence.fp32 and evidence.symptoms - OF_DTYPES and not evidence.fp32_fails)


def sites_of(run: RunView, control: str) -> Sequence[HalfSite]:
    """The sites that ``control`` lifts, those first that lose most."""
    names = {*lifted(control)}
    found = [s for s in run.sites if s.line in names or _part(s) in names]
    return sorted(found, key=lost, reverse=True)
