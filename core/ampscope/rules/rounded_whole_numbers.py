"""Whole numbers moved, or fell onto one another, when they became half.

What it detects
    Ids, labels, positions, counts or times that are not the same numbers in half; and numbers
    beyond the format's last that it holds exactly, read out of half as integers again. Latent
    while no comparison with fp32 shows harm and the numbers are labels or indices.

Why it matters
    fp16 holds every whole number up to 2,048 and bf16 up to 256; above, every second, every fourth
    and so on. Classes, rows and documents coincide, and the loss may look as good as ever.

Blind spots
    Numbers are counted on a sample. Whole numbers in a table with fractions beside them are seen
    where they are read as integers alone.

Remedy
    Keep whole numbers in an integer format, apart from what is cast to half.
"""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.symptoms import symptoms
from ampscope.control import BASELINE, Control
from ampscope.numerics.formats import FORMATS
from ampscope.observations import HalfSite, OpUse
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    passed,
)

READ = "half_whole"  # the fact of an op's use: integers read out of half
MOST_LINES = 2  # an array that NumPy makes, and the line that takes it
NAMED = frozenset({"labels", "whole numbers"})  # roles in which whole numbers are not rounded


def check(evidence: Evidence) -> Verdict:
    """Found where rounded labels or indices come with harm, latent where none is seen; others found
    where the training does without harm once they are fp32."""
    return _judged(evidence)


def last_resort(evidence: Evidence) -> Verdict:
    """The same, and others found as well where no other cause explains the symptoms."""
    return _judged(evidence, is_open=True)


def _judged(evidence: Evidence, *, is_open: bool = False) -> Verdict:
    run = evidence.baseline
    read = run.use(READ)
    rounded = [s for s in run.sites if s.whole and s.role in NAMED and (s.changed or s.merged)]
    site = max(rounded, key=lambda s: (s.merged, s.changed), default=None)
    site = site or (None if read is None else _source_of(read, run.sites))
    if site is None and read is None:
        return passed("No whole numbers were rounded to half.")
    is_used = read is not None or (site is not None and site.role == "labels")
    if not evidence.symptoms and not is_used:
        return passed("Whole numbers were rounded to half; nothing shows that it matters.")
    found = _found(site, read, run.sites)
    lifted = [view for name in found.fix.controls if (view := evidence.runs.get(name))]
    in_vain = any(evidence.symptoms & symptoms(view, evidence.fp32) for view in lifted)
    if not is_used and (in_vain or not (is_open or lifted)):
        return passed("Whole numbers were rounded to half; nothing shows that they do the harm.")
    # A number that is not finite comes of another fault.
    if not evidence.symptoms or evidence.root is not None or in_vain:
        return replace(found, status=Status.LATENT)
    return found


def _source_of(read: OpUse, sites: list[HalfSite]) -> HalfSite | None:
    """Where the numbers that ``read`` takes out of half became half: the only place before it that
    made numbers so large half, of data or of nothing that is known, or the only one at its line."""
    beyond = [
        s
        for s in _before(read, sites)
        if s.largest is not None and s.largest > exact_up_to(s.dtype)
    ]
    elsewhere = [s for s in beyond if s.line != read.line]
    return next((found[0] for found in (elsewhere, beyond) if len(found) == 1), None)


def _unseen_sources(read: OpUse, sites: list[HalfSite]) -> tuple[str, ...]:
    """Lines before ``read`` that load half numbers, or make them in NumPy: what they were before is
    not known."""
    loads = [s for s in _before(read, sites) if s.largest is None and s.line]
    lines = tuple(dict.fromkeys(s.line for s in loads))
    return lines if len(lines) <= MOST_LINES else ()


def _before(read: OpUse, sites: list[HalfSite]) -> list[HalfSite]:
    roles = {"", "data", "constants", "buffers", *NAMED}
    return [s for s in sites if s.role in roles and s.step <= read.step]


def exact_up_to(dtype: str) -> float:
    """Up to which number ``dtype`` holds every whole one: 2,048 in fp16, 256 in bf16."""
    return 2.0 ** (FORMATS[dtype].mantissa_bits + 1)


def _found(site: HalfSite | None, read: OpUse | None, sites: list[HalfSite]) -> Verdict:
    words: list[str] = []
    values: list[Measurement] = []
    if site is not None:
        limit = exact_up_to(site.dtype)
        words.append(
            f"Line {site.line} makes {site.dtype} of {'whole ' if site.whole else ''}numbers up to"
            f" {site.largest or 0.0:,.0f}; {site.dtype} holds every whole number up to"
            f" {limit:,.0f}."
        )
        if site.whole and site.merged:  # others round in any case
            left = site.distinct - site.merged
            words.append(f"Of {site.distinct:,} different ones {left:,} are left.")
            values.append(Measurement("different numbers left", left, site.distinct, BASELINE))
        if site.whole and site.changed:
            words.append(f"{site.changed:,} of {site.elements:,} are other numbers now.")
            values.append(Measurement("numbers moved", site.changed, 0, BASELINE, site.step))
    if read is not None:
        count, total = int(read.value or 0), int(read.other or 0)
        words.append(
            f"Line {read.line} reads whole numbers out of half precision: {count:,} of {total:,}"
            " lie where the format does not hold every one."
        )
        values.append(Measurement("numbers out of the exact range", count, 0, BASELINE, read.step))
    lines: tuple[str, ...] = (site.line,) if site is not None and site.line else ()
    if site is None and read is not None:
        lines = _unseen_sources(read, sites)
    line = lines[0] if lines else read.line if read is not None else ""
    controls = (Control.of(fp32_lines=lines),) if lines else ()
    return Verdict(
        Status.FOUND,
        " ".join(words),
        phase="forward",
        step=site.step if site is not None else read.step if read is not None else 0,
        line=line,
        evidence=tuple(values),
        fix=Fix(
            "drop_cast",
            "Keep whole numbers as integers (int32, int64), apart from what is cast to half.",
            "ids = ids.long()  # never through half precision\n",
            controls,
        ),
    )


RULE = Rule(
    code="AMP039",
    id="rounded_whole_numbers",
    title="Whole numbers were rounded to half",
    definition="Ids, labels, positions or counts beyond the exact range of a half format moved or "
    "fell onto one another.",
    check=check,
    needs=(BASELINE, "fp32"),
    last_resort=last_resort,
    order=34,
    explains=("low_precision_constants",),
)
