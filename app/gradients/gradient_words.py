"""Sentences of the Gradients page, computed from counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ampscope.analysis.distribution import LOST, NONFINITE, NORMAL, OVERFLOW, SUBNORMAL, ZERO
from ampscope.analysis.underflow import Counts, UnderflowOverTime, WithoutShadow
from ampscope.exponents import Raw
from app.gradients.gradient_terms import ROLE_NAMES, View
from app.text import count, cut, percent, plural, share


def answer(view: View, counts: Raw) -> str:
    """The page's sentence; ``counts`` is [modules, 6]."""
    name = ROLE_NAMES[view.role]
    start = f"{view.when}, {name} {view.title}: "
    total = counts.sum(axis=0)
    finite = int(total[[LOST, SUBNORMAL, NORMAL, OVERFLOW]].sum())
    parts = [_not_finite(counts)] if total[NONFINITE] else []
    if 2 * total[ZERO] > total.sum():  # more than half: whatever follows is about the rest
        parts.append(f"{share(int(total[ZERO]), int(total.sum()))} were recorded as exactly zero")
    if finite == 0:
        parts.append("no element is finite and non-zero")
        return start + "; ".join(parts) + "."
    fmt = view.format_name
    told = [
        (OVERFLOW, f"overflow {fmt}"),
        (LOST, f"are too small for {fmt} and would be zero in it"),
        (SUBNORMAL, f"are subnormal in {fmt} (fewer bits)"),
    ]
    found = [
        f"{total[column]:,} ({percent(total[column] / finite)}) {words}"
        for column, words in told
        if total[column]
    ]
    if found:
        parts.append(f"of {finite:,} finite non-zero elements " + " and ".join(found))
    else:
        parts.append(f"all {finite:,} finite non-zero elements are normal numbers in {fmt}")
    return start + "; ".join(parts) + "."


def ranks_seen(ranks: Sequence[int], left_out: Sequence[int]) -> str:
    """Whose counts are shown, of a training of several ranks."""
    if len(ranks) == 1 and not left_out:
        return f"Counted by rank {ranks[0]}."
    text = f"Added up over {plural(len(ranks), 'rank')} ({', '.join(map(str, ranks))})."
    if left_out:
        named = ", ".join(map(str, left_out))
        text += f" Not in the sum, because its histograms cover other steps: rank {named}."
    return text


def zeros_seen(view: View, counts: Raw) -> str:
    """What the chart cannot say about elements that were zero or not finite when recorded."""
    total = counts.sum(axis=0)
    text = f"{share(int(total[ZERO]), int(total.sum()))} of the elements are exactly zero."
    if total[ZERO] and view.role.is_gradient:
        text += " Whether they were lost, only the shadow below can tell."
    if view.shift and (total[ZERO] or total[NONFINITE]):
        text += " Another loss scale does not move zeros, NaN and Inf that were recorded."
    return text


def map_seen(shown: int, hits: int, text: str, order: str, *, is_trouble: bool) -> str:
    """Above the heat map: how many of the modules that hold ``text`` it shows, and which."""
    found = f" whose path holds “{text}”" if text else ""
    words = "Hue is the zone, strength the share of the module's elements."
    if shown < hits:
        which = f"The {shown} modules in most trouble" if is_trouble else f"The first {shown}"
        return f"{which} of {hits:,}{found}, {order}. {words}"
    return f"{plural(hits, 'module')}{found}, {order}. {words}"


def underflow_seen(series: UnderflowOverTime, names: dict[int, str]) -> str:
    """What the shadows found, over all modules and sampled steps."""
    totals = int(series.total.sum())
    lost = f"{_part(series.lost, totals)} lost"
    if series.is_split:
        lost = (
            f"{_part(series.below_range, totals)} below the format's range, "
            f"{_part(series.cancelled, totals)} cancelled or flipped"
        )
    text = (
        f"At {plural(len(series.steps), 'sampled step')}, of {totals:,} elements the shadow found "
        f"{lost}, {_part(series.subnormal, totals)} subnormal and "
        f"{_part(series.zero_before, totals)} zero before."
    )
    if not series.lost.any():
        return text
    shares = np.nan_to_num(series.share("lost"))
    row, column = np.unravel_index(int(shares.argmax()), shares.shape)
    worst = cut(names.get(series.modules[row], "?"))
    return text + (
        f" Worst: {worst} at step {series.steps[column]}, {percent(float(shares[row, column]))}"
        " lost."
    )


def inconclusive(known: WithoutShadow, name: str, step: int) -> str:
    """What the histogram of one module says where no shadow was taken."""
    return (
        f"No shadow was taken, so how many gradients were lost is inconclusive. In {cut(name)} at "
        f"step {step}, {share(known.zero, known.total)} elements are zero: any number of them, "
        f"from none to all, may have been lost. {count(known.subnormal)} are subnormal."
    )


def module_seen(name: str, row_counts: Raw, format_name: str) -> str:
    """Above one module's histogram; ``row_counts`` is [6]."""
    finite = int(row_counts[[LOST, SUBNORMAL, NORMAL, OVERFLOW]].sum())
    parts = [
        f"{share(int(row_counts[column]), finite)} {word}"
        for column, word in (
            (LOST, "too small"),
            (SUBNORMAL, "subnormal"),
            (OVERFLOW, "overflowing"),
        )
        if row_counts[column]
    ]
    if row_counts[NONFINITE]:
        parts.insert(0, f"{count(int(row_counts[NONFINITE]))} not finite")
    told = ", ".join(parts) if parts else f"all {finite:,} finite non-zero elements normal"
    return f"{cut(name)} in {format_name}: {told}; {count(int(row_counts[ZERO]))} exactly zero."


def history_seen(name: str, steps: int, nonfinite_steps: int, first: int | None) -> str:
    """Above one module's histograms over time."""
    text = f"{cut(name)} at {plural(steps, 'recorded step')}, the first at the top."
    if nonfinite_steps and first is not None:
        return f"{text} NaN or Inf at {plural(nonfinite_steps, 'step')}, first at step {first}."
    return text + " Never NaN or Inf."


def _not_finite(counts: Raw) -> str:
    modules = int((counts[:, NONFINITE] > 0).sum())
    n, whole = int(counts[:, NONFINITE].sum()), int(counts.sum())
    return f"{share(n, whole)}, are NaN or Inf, in {plural(modules, 'module')}"


def _part(counts: Counts, whole: int) -> str:
    n = int(counts.sum())
    return f"{n:,} ({percent(n / whole)})" if whole else count(n)


def lines_seen(
    name: str, lost: Sequence[int], totals: Sequence[int], below: Sequence[int] | None = None
) -> str:
    """Above the counts of one module; of the ``lost`` ones, ``below`` are below the format's range
    (None: not recorded)."""
    steps = plural(len(totals), "sampled step")
    hit = sum(n > 0 for n in lost)
    if not hit:
        return f"{cut(name)}: nothing lost at {steps}."
    worst = max(range(len(lost)), key=lambda i: lost[i] / max(totals[i], 1))
    most = share(lost[worst], totals[worst])
    text = f"{cut(name)}: lost elements at {hit} of {steps}, at most {most}."
    if below is None:
        return text
    return f"{text} {share(sum(below), sum(lost))} of all lost ones are below the format's range."
