"""The heat map of the Gradients page: what is looked at, which modules, and how it is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from ampscope.analysis.distribution import (
    merged,
    scale_exponent,
    selected,
    shift_between,
    trouble,
    zone_counts,
)
from ampscope.formats import NumberFormat
from ampscope.records import Role, RunInfo
from app import chart, layout, links, store
from app.figures.exponent_map import MapRows, exponent_map
from app.gradients import gradient_controls, gradient_words, rank_frames, shadow_words
from app.gradients.gradient_tables import Look, counts_table, histogram_table, name_in
from app.gradients.gradient_terms import ROLE_NAMES, View
from app.gradients.rank_frames import Ranks
from app.layout import KeyFigure
from app.runs import scale_window
from app.runs.module_names import find_box, names_by_index, short_names
from app.text import count, percent, share

TICK_LENGTH = 26  # characters beside the plot: 160 px of the 470 that 800 px leave it
SHOWN = (40, 100, 1000)  # rows of the heat map; more than a screenful is asked for
MODEL_ORDER, WORST_FIRST = "model order", "worst first"


def choose(ranks: Ranks, role: Role, fmt: NumberFormat) -> Look:
    """Step and loss scale, and the histograms they lead to."""
    span = gradient_controls.pick_span(rank_frames.spans(ranks, role))
    found = rank_frames.shown(ranks, role, span)
    if found is None:
        raise LookupError(f"step {span[0]} of {role} was listed and is gone")
    frame = merged(found.frame)
    exponent = scale_exponent(frame.scale) if role.is_gradient else None
    wanted = None if exponent is None else gradient_controls.pick_scale(exponent)
    shift = (shift_between(frame.scale, wanted) if wanted is not None else None) or 0
    view = View(role, span[0], fmt.name, frame.scale, wanted, shift, span[1], found.recorded_steps)
    names = names_by_index(store.modules(ranks[0]))
    counts = zone_counts(frame, fmt, shift)
    return Look(view, frame, fmt, counts, names, found.ranks, found.left_out)


def overview(run: RunInfo, look: Look) -> None:
    """The sentence and the key figures."""
    layout.sentence(gradient_words.answer(look.view, look.counts))
    if run.spec.world > 1:
        layout.see(gradient_words.ranks_seen(look.ranks, look.left_out))
    sampled = store.shadows(run, look.view.role, look.view.step)
    if sampled and look.view.role.is_gradient:
        layout.see(shadow_words.lost_on_the_way(sampled))
    scale_window.say(look.frame, look.fmt, look.names, ROLE_NAMES[look.frame.role])
    total = look.counts.sum(axis=0).tolist()
    finite, whole, fmt = sum(total[:4]), sum(total), look.fmt.name
    layout.key_figures(
        [
            _figure("Too small", total[0], finite, f"non-zero, and would be zero in {fmt}"),
            _figure("Subnormal", total[1], finite, f"kept in {fmt} with fewer bits"),
            _figure("Overflow", total[3], finite, f"beyond {fmt}'s largest number"),
            _figure("Not finite", total[5], whole, "NaN, +Inf and -Inf, as recorded"),
        ]
    )


def heat_map(look: Look) -> None:
    """Module by exponent."""
    text, order, limit = _pick_rows(look)
    hits = found(look, text)
    if not hits:
        st.info("No module's name holds this text.")
        return
    places = rows_to_show(look, hits, order, limit)
    is_trouble = bool(trouble(look.counts).any())
    layout.see(gradient_words.map_seen(len(places), len(hits), text, order, is_trouble=is_trouble))
    part = selected(look.frame, [look.frame.modules[i] for i in places])
    names = [name_in(look, module) for module in part.modules]
    rows = MapRows(
        rows=part.rows,
        ticks=short_names(names, TICK_LENGTH),
        names=[f"{name} ({dtype})" for name, dtype in zip(names, part.dtypes, strict=True)],
        shifts=[look.view.shift] * len(names),
    )
    figure = exponent_map(rows, look.fmt, x_title=look.view.axis_title, y_title="module")
    chart.show(figure, "histograms", lambda: histogram_table(look), key="gradients-map")
    st.caption(gradient_words.zeros_seen(look.view, look.counts))


def zone_table(look: Look) -> None:
    """Counts of every module, folded."""
    with layout.details("Counts of every module"):
        table = counts_table(look)
        st.dataframe(table, hide_index=True, key="gradients-counts", height=420)
        chart.download(lambda: table, "zones", key="gradients-counts")


def found(look: Look, text: str) -> list[int]:
    """Places in the frame of the modules whose name holds ``text``, whatever the case."""
    wanted = text.lower()
    return [i for i, m in enumerate(look.frame.modules) if wanted in name_in(look, m).lower()]


def rows_to_show(look: Look, hits: Sequence[int], order: str, limit: int) -> list[int]:
    """At most ``limit`` of ``hits``: those in most trouble, and then in the order asked for."""
    score = trouble(look.counts)
    worst = sorted(hits, key=lambda i: (-score[i], i))[:limit]
    return worst if order == WORST_FIRST else sorted(worst)


def _pick_rows(look: Look) -> tuple[str, str, int]:
    """Search, order and limit."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = find_box("part of a module's path")
        order = links.pick("Order", "order", (MODEL_ORDER, WORST_FIRST))
        modules = len(look.frame.modules)
        limits = [n for i, n in enumerate(SHOWN) if i == 0 or SHOWN[i - 1] < modules]
        limit = links.pick("Rows", "rows", limits) if len(limits) > 1 else limits[0]
    return text, order, limit


def _figure(label: str, n: int, whole: int, meaning: str) -> KeyFigure:
    value = f"{_brief(n)} ({percent(n / whole)})" if n and whole else count(n)
    return KeyFigure(label, value, f"{share(n, whole)}: {meaning}")


def _brief(n: int) -> str:
    """Four figures side by side have room for six digits; the whole count is on hover."""
    return count(n) if n < 10**6 else f"{n / 1e6:,.1f} M"
