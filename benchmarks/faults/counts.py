"""What a score found, as counts that add up; their shares with Wilson intervals; the confusion matrix.

Of the sealed set nothing but these counts is kept, one entry for each drawing::

    {"drawings": [{"on": "2026-11-24", "rules": "0.1.0 (1f2e3d4c)", "policy": "native",
                   "from": {"faults": 0, "healthy": 0}, "to": {"faults": 412, "healthy": 205},
                   "counts": {"faults": 120, "healthy": 60, "shares": {"cause first": [97, 120]}}}]}

``from`` and ``to`` are places in the sequence of what is drawn, before plain runs prove it; the next
drawing goes on where the last one ended. Counts are numbers, pairs [hits, of], and tables of these,
so any two of them add up entry by entry (:func:`added`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

Row = dict[str, Any]
Counts = dict[str, Any]
NO_FAULT = "no_fault"

# Of faulty scripts. Module and line count where the cause is right and a key has them; None: no key.
# A mechanism's cause is right where an accepted one is named, or harmful_rounding at its line.
OF_FAULTS: dict[str, Callable[[Row], bool | None]] = {
    "cause first": lambda row: row["right"],
    "cause first, training harmed": lambda row: row["right"] if row["harmed"] else None,
    "cause among three": lambda row: row["among_three"],
    "wrong cause": lambda row: row["wrong_cause"],
    "undetermined": lambda row: row["undetermined"],
    "no fault over damage": lambda row: row["no_fault"],
    "module": lambda row: row["module_right"],
    "line": lambda row: row["line_right"],
    "fix cured, of those run": lambda row: row["verified"] if row["right"] else None,
    "cause or site first": lambda row: row["right"] or bool(row.get("site_right")),
    "cause or site first, without a rule": lambda row: (
        None if row.get("has_rule", True) else row["right"]
    ),
    "lifted site heals": lambda row: row.get("healed"),
}
OF_HEALTHY: dict[str, Callable[[Row], bool | None]] = {
    "false alarms": lambda row: row["wrong_cause"],
    "healthy undetermined": lambda row: row["undetermined"],
    "healthy with a latent finding": lambda row: bool(row.get("latent")),
}
GROUPS = ("cause", "program", "form", "policy")
OF_MECHANISMS = ("site", "role", "place")  # further groups, of rows that have them


def counts(rows: Sequence[Row]) -> Counts:
    """The counts of these rows. Where the training is not harmed, a latent finding of the planted
    cause is right."""
    faulty = [r for r in rows if r["cause"] != NO_FAULT]
    healthy = [r for r in rows if r["cause"] == NO_FAULT]
    shares = {name: _share(map(ask, faulty)) for name, ask in OF_FAULTS.items()}
    shares |= {name: _share(map(ask, healthy)) for name, ask in OF_HEALTHY.items()}
    seconds = Counter(str(round(r["elapsed_s"])) for r in rows if r["elapsed_s"] is not None)
    found: Counts = {
        "faults": len(faulty),
        "healthy": len(healthy),
        "shares": shares,
        "seconds": dict(seconds),
        "confusion": {
            cause: dict(Counter(shown(r) for r in rows if r["cause"] == cause))
            for cause in sorted({r["cause"] for r in rows})
        },
    }
    for group in (*GROUPS, *OF_MECHANISMS):
        names = sorted({r[group] for r in faulty if r.get(group) is not None})
        found[f"by {group}"] = {
            name: _share(r["right"] for r in faulty if r.get(group) == name) for name in names
        }
    return found


def added(all_counts: Iterable[Counts]) -> Counts:
    """The sum of several counts."""
    return functools.reduce(_plus, all_counts, counts([]))


def _plus(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        names = [*one, *(name for name in other if name not in one)]
        return {
            name: _plus(one[name], other[name])
            if name in one and name in other
            else one.get(name, other.get(name))
            for name in names
        }
    if isinstance(one, list):
        return [_plus(a, b) for a, b in zip(one, other, strict=True)]
    return one + other


def _share(answers: Iterable[bool | None]) -> list[int]:
    """[hits, of] of the answers that are not None."""
    given = [bool(a) for a in answers if a is not None]
    return [sum(given), len(given)]


def shown(row: Row) -> str:
    """The column of a row: an accepted cause counts as the planted one."""
    if row["right"]:
        return str(row["cause"])
    return "undetermined" if row["undetermined"] else str(row["found"][0])


# ---- as words ----------------------------------------------------------------------------------------


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not of:
        return 0.0, 1.0
    z = 1.96
    share, spread = hits / of, z / (2 * of) * math.sqrt(4 * hits * (of - hits) / of + z * z)
    middle, divisor = share + z * z / (2 * of), 1 + z * z / of
    return max(0.0, (middle - spread) / divisor), min(1.0, (middle + spread) / divisor)


def rate(hits: int, of: int) -> str:
    """ "93.1 % (87.0 to 96.4), 108 of 116"."""
    if not of:
        return "none"
    low, high = wilson(hits, of)
    return f"{hits / of:.1%} ({low:.1%} to {high:.1%}), {hits} of {of}"


def seconds(found: Counts) -> tuple[int, int] | None:
    """Median (the lower of two) and worst, in whole seconds; None without a diagnosis."""
    ordered = sorted((int(value), count) for value, count in found["seconds"].items())
    half, passed = (sum(count for _, count in ordered) + 1) // 2, 0
    for value, count in ordered:
        passed += count
        if passed >= half:
            return value, ordered[-1][0]
    return None


def summary(found: Counts) -> Row:
    """The counts as words."""
    ordered = {
        cause: dict(Counter(columns).most_common())
        for cause, columns in sorted(found["confusion"].items())
    }
    return {
        **{name: rate(*share) for name, share in found["shares"].items()},
        "seconds, median and worst": list(seconds(found) or ()),
        **{
            f"by {group}": {n: rate(*share) for n, share in sorted(groups.items())}
            for group in (*GROUPS, *OF_MECHANISMS)
            if (groups := found.get(f"by {group}")) or group in GROUPS
        },
        "confusion": ordered,
    }


def confusion_svg(confusion: dict[str, dict[str, int]]) -> str:
    """The confusion matrix: planted causes as rows, verdicts as columns."""
    rows = sorted(confusion)
    columns = sorted({c for found in confusion.values() for c in found} | set(rows))
    cell, left, top = 22, 230, 190
    width, height = left + cell * len(columns) + 100, top + cell * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="{top - 8}" font-weight="bold">planted, verdict on top</text>',
    ]
    for n, column in enumerate(columns):
        x = left + cell * n + cell / 2 + 4
        parts.append(
            f'<text transform="translate({x} {top - 6}) rotate(-60)">{escape(column)}</text>'
        )
    for m, cause in enumerate(rows):
        y = top + cell * m
        total = sum(confusion[cause].values())
        parts.append(
            f'<text x="{left - 6}" y="{y + 15}" text-anchor="end">{escape(cause)} ({total})</text>'
        )
        for n, column in enumerate(columns):
            count = confusion[cause].get(column, 0)
            colour = "26,122,76" if cause == column else "180,40,40"
            fill = f"rgba({colour},{0.15 + 0.85 * count / total:.2f})" if count else "#f2f2f2"
            x = left + cell * n
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{cell - 2}" fill="{fill}"/>'
            )
            if count:
                parts.append(f'<text x="{x + 10}" y="{y + 15}" text-anchor="middle">{count}</text>')
    return "\n".join([*parts, "</svg>\n"])
