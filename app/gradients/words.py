"""Sentences of the page Gradients, computed from counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ampscope.analysis import underflow
from ampscope.analysis.distribution import LOST, NONFINITE, NORMAL, OVERFLOW, SUBNORMAL, ZERO
from ampscope.numerics.histogram import Raw
from ampscope.records import ShadowRecord
from ampscope.story.shared import ROLE_NAMES
from app.gradients.frames import ScaleView
from app.text import count, cut, percent, plural, share


def answer(view: ScaleView, counts: Raw, fmt: str) -> str:
    """The page's sentence; ``counts`` is [modules, 6], ``fmt`` the name of the format."""
    total = counts.sum(axis=0)
    whole = int(total.sum())
    finite = int(total[[LOST, SUBNORMAL, NORMAL, OVERFLOW]].sum())
    parts = []
    if total[NONFINITE]:
        modules = plural(int((counts[:, NONFINITE] > 0).sum()), "module")
        parts.append(f"{share(int(total[NONFINITE]), whole)}, are NaN or Inf, in {modules}")
    if 2 * total[ZERO] > whole:  # more than half: whatever follows is about the rest
        parts.append(f"{share(int(total[ZERO]), whole)} were recorded as exactly zero")
    found = [
        f"{total[column]:,} ({percent(total[column] / finite)}) {what}"
        for column, what in (
            (OVERFLOW, f"overflow {fmt}"),
            (LOST, f"are too small for {fmt} and would be zero in it"),
            (SUBNORMAL, f"are subnormal in {fmt} (fewer bits)"),
        )
        if total[column]
    ]
    if finite == 0:
        parts.append("no element is finite and non-zero")
    elif found:
        parts.append(f"of {finite:,} finite non-zero elements " + " and ".join(found))
    else:
        parts.append(f"all {finite:,} finite non-zero elements are normal numbers in {fmt}")
    return f"{view.when}, {ROLE_NAMES[view.role]} {view.title}: {'; '.join(parts)}."


def ranks_seen(ranks: Sequence[int], left_out: Sequence[int]) -> str:
    """Whose counts are shown, of a training of several ranks."""
    if len(ranks) == 1 and not left_out:
        return f"Counted by rank {ranks[0]}."
    text = f"Added up over {plural(len(ranks), 'rank')} ({', '.join(map(str, ranks))})."
    if left_out:
        named = ", ".join(map(str, left_out))
        text += f" Not in the sum, because its histograms cover other steps: rank {named}."
    return text


def lost_on_the_way(sampled: Sequence[ShadowRecord]) -> str:
    """What had become zero before it could be counted, by the fp32 shadow of the step: the
    histogram alone cannot tell."""
    lost, total = sum(s.lost for s in sampled), sum(s.total for s in sampled)
    if not lost:
        return "Against the fp32 shadow of this step nothing was lost on the way."
    below = sum(s.below_range for s in sampled)
    return (
        f"Against the fp32 shadow of this step {share(lost, total)} of all elements were lost "
        f"on the way: zero as recorded, not zero in fp32. {share(below, lost)} of these are below "
        "the format's range; the others cancelled or flipped. No histogram shows those, and no "
        "scale that is applied now brings them back."
    )


def map_seen(shown: int, hits: int, text: str, order: str, *, is_trouble: bool) -> str:
    """Above the heat map: how many of the modules that hold ``text`` it shows, and which."""
    which = plural(hits, "module")
    if shown < hits:
        first = f"The {shown} modules in most trouble" if is_trouble else f"The first {shown}"
        which = f"{first} of {hits:,}"
    found = f" whose path holds “{text}”" if text else ""
    return (
        f"{which}{found}, {order}. The hue is the zone; the opacity is the share of the module's "
        "elements."
    )


def zeros_seen(view: ScaleView, counts: Raw) -> str:
    """What the chart cannot say about elements that were zero or not finite when recorded."""
    total = counts.sum(axis=0)
    text = f"{share(int(total[ZERO]), int(total.sum()))} of the elements are exactly zero."
    if total[ZERO] and view.role.is_gradient:
        text += " Whether they were lost, only the shadow can tell: see lost over time."
    if view.shift and (total[ZERO] or total[NONFINITE]):
        text += " Another loss scale does not move zeros, NaN and Inf that were recorded."
    return text


def module_seen(name: str, row_counts: Raw, format_name: str) -> str:
    """Above one module's histogram; ``row_counts`` is [6]."""
    finite = int(row_counts[[LOST, SUBNORMAL, NORMAL, OVERFLOW]].sum())
    parts = [f"{count(int(row_counts[NONFINITE]))} not finite"] if row_counts[NONFINITE] else []
    parts += [
        f"{share(int(row_counts[column]), finite)} {word}"
        for column, word in (
            (LOST, "too small"),
            (SUBNORMAL, "subnormal"),
            (OVERFLOW, "overflowing"),
        )
        if row_counts[column]
    ]
    found = ", ".join(parts) or f"all {finite:,} finite non-zero elements normal"
    return f"{cut(name)} in {format_name}: {found}; {count(int(row_counts[ZERO]))} exactly zero."


def history_seen(name: str, steps: int, bad: Sequence[int]) -> str:
    """Above one module's histograms over time; ``bad`` are the steps with NaN or Inf."""
    text = f"{cut(name)} at {plural(steps, 'recorded step')}, the first at the top."
    if bad:
        return f"{text} NaN or Inf at {plural(len(bad), 'step')}, first at step {bad[0]}."
    return text + " Never NaN or Inf."


def underflow_seen(series: underflow.UnderflowOverTime, names: dict[int, str]) -> str:
    """What the shadows found, over all modules and sampled steps."""
    whole = int(series.total.sum())

    def part(counts: underflow.Counts) -> str:
        n = int(counts.sum())
        return f"{n:,} ({percent(n / whole)})" if whole else count(n)

    text = (
        f"At {plural(len(series.steps), 'sampled step')}, of {whole:,} elements the shadow found "
        f"{part(series.below_range)} below the format's range, {part(series.cancelled)} cancelled "
        f"or flipped, {part(series.subnormal)} subnormal and {part(series.zero_before)} zero in "
        "both."
    )
    if not series.lost.any():
        return text
    shares = np.nan_to_num(series.share("lost"))
    row, column = np.unravel_index(int(shares.argmax()), shares.shape)
    worst = cut(names.get(series.modules[row], "?"))
    return (
        f"{text} Worst: {worst} at step {series.steps[column]}, "
        f"{percent(float(shares[row, column]))} lost."
    )


def lines_seen(name: str, lost: Sequence[int], totals: Sequence[int], below: Sequence[int]) -> str:
    """Above the counts of one module; of the ``lost`` ones, ``below`` are below the format's
    range."""
    steps = plural(len(totals), "sampled step")
    hit = sum(n > 0 for n in lost)
    if not hit:
        return f"{cut(name)}: nothing lost at {steps}."
    worst = max(range(len(lost)), key=lambda i: lost[i] / max(totals[i], 1))
    most = share(lost[worst], totals[worst])
    text = f"{cut(name)}: lost elements at {hit} of {steps}, at most {most}."
    return f"{text} {share(sum(below), sum(lost))} of all lost ones are below the format's range."


def inconclusive(known: underflow.WithoutShadow, name: str, step: int) -> str:
    """What the histogram of one module says where no shadow was taken."""
    return (
        f"No shadow was taken, so how many gradients were lost is not known. In {cut(name)} at "
        f"step {step}, {share(known.zero, known.total)} elements are zero: any number of them, "
        f"from none to all, may have been lost. {count(known.subnormal)} are subnormal."
    )
