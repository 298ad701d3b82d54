"""One module in detail: its histogram at this step, and at every recorded step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import streamlit as st

from ampscope.analysis.distribution import scale_exponent, trouble
from ampscope.exponents import NAN, NEG_INF, Raw
from ampscope.store.series import ModuleSeries
from app import chart, layout, links
from app.figures.exponent_bars import exponent_bars
from app.figures.exponent_map import MapRows, exponent_map
from app.gradients import gradient_words, rank_frames
from app.gradients.gradient_tables import Look, bins_table, name_in
from app.gradients.rank_frames import Ranks
from app.runs.module_names import pick_module
from app.text import plural

HISTORY_PX, TALLEST_ROW_PX = 560, 18
AT_ONCE_STEPS = 200  # 30 ms of reading; a longer history is read when somebody asks for it
_HISTORY = "gradients:history"
RECORDED, UNSCALED = "as recorded", "unscaled"


def pick(look: Look) -> int:
    """The module in detail: the one in most trouble until somebody chooses."""
    worst = look.frame.modules[int(np.argmax(trouble(look.counts)))]
    return pick_module("Module", look.names, look.frame.modules, worst)


def at_step(look: Look, module: int) -> None:
    """Its histogram in the page's view."""
    place = look.frame.modules.index(module)
    row, counts = look.frame.rows[place], look.counts[place]
    layout.see(gradient_words.module_seen(name_in(look, module), counts, look.fmt.name))
    figure = exponent_bars(row, look.fmt, look.view.shift, x_title=look.view.axis_title)
    chart.show(
        figure,
        "histogram",
        lambda: bins_table([("step", [look.view.step])], row[None, :], [look.view.shift]),
        key="gradients-module",
    )


def over_time(ranks: Ranks, look: Look, module: int) -> None:
    """Its histograms at all recorded steps, as recorded or unscaled, never a mixture."""
    steps = len(rank_frames.spans(ranks, look.view.role))
    if not _wants_history(steps):
        return
    series = rank_frames.series(ranks, look.view.role, module)
    unscaled = look.view.role.is_gradient and _pick_view() == UNSCALED
    shifts = shifts_of(series, unscaled=unscaled)
    bad = [s for s, row in zip(series.steps, series.rows, strict=True) if _nonfinite(row)]
    first = bad[0] if bad else None
    name = name_in(look, module)
    layout.see(gradient_words.history_seen(name, len(series.steps), len(bad), first))
    rows = MapRows(
        rows=series.rows,
        ticks=[str(step) for step in series.steps],
        names=_names(series),
        shifts=shifts,
    )
    title = "magnitude, unscaled" if unscaled else "magnitude, as recorded"
    row_px = min(TALLEST_ROW_PX, HISTORY_PX / max(1, len(series.steps)))
    figure = exponent_map(rows, look.fmt, x_title=title, y_title="step", row_px=row_px)
    chart.show(
        figure,
        "history",
        lambda: bins_table([("step", list(series.steps))], series.rows, shifts),
        key="gradients-over-time",
    )


def shifts_of(series: ModuleSeries, *, unscaled: bool) -> list[int]:
    """Powers of two by which each step's row moves: the run's own scale changes over time."""
    if not unscaled:
        return [0] * len(series.steps)
    return [-(scale_exponent(scale) or 0) for scale in series.scales]


def _names(series: ModuleSeries) -> list[str]:
    """Distinct: ranks may cover the same first step with frames of their own."""
    whole = [
        f"step {first}" if first == last else f"steps {first} to {last}"
        for first, last in zip(series.steps, series.last_steps, strict=True)
    ]
    seen: Counter[str] = Counter()
    names = []
    for name in whole:
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _wants_history(steps: int) -> bool:
    """Bound to the URL's ``history``; a long one waits until somebody asks for it."""
    asked = links.wanted("history") or ("on" if steps <= AT_ONCE_STEPS else "off")
    is_on = st.toggle(f"All {plural(steps, 'recorded step')}", asked == "on", key=_HISTORY)
    links.keep("history", "on" if is_on else "off")
    return is_on


def _pick_view() -> str:
    return links.pick("Over time", "over", (RECORDED, UNSCALED))


def _nonfinite(row: Raw) -> bool:
    return bool(row[NAN : NEG_INF + 1].any())
