"""Sections of the Layers page: each takes what was read and draws one thing."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import streamlit as st

from ampscope.analysis.casts import cast_sites
from ampscope.analysis.dtypes import fold, parameters_by_dtype
from ampscope.analysis.flops import flop_share, flops_by_module
from ampscope.analysis.fp32_ops import fp32_ops, modules_by_precision
from ampscope.records import RunInfo
from app import chart, layout, links, states, store
from app.figures import flops_by_module as flops_figure
from app.layers import layers_tables, layers_words
from app.layers.layers_data import ALL_PHASES, PHASES, Layers, OpSet, list_lookup, op_sets, read
from app.layout import KeyFigure
from app.runs.module_names import find_box, names_by_index, pick_module, short_names
from app.text import count, percent, plural, share

TICK_LENGTH = 26  # characters beside the plot, as on Gradients
SHOWN_MODULES = 15  # bars of the FLOP chart
MOST_STEPS = 20_000  # whose op sets are told apart: 0.1 s of reading
UNFOLDED = 200  # a larger tree starts folded to at most so many rows


def choose(run: RunInfo) -> Layers:
    """The phase and, where steps differ, the set of ops to look at."""
    if run.spec.kind == "watch":  # no op of it is traced, in any phase
        return read(run, None, ALL_PHASES)
    sets = op_sets(store.steps(run, points=MOST_STEPS))
    with st.container(horizontal=True, vertical_alignment="bottom"):
        phase = links.pick("Phase", "phase", PHASES)
        chosen = _pick_ops(sets) if len(sets) > 1 else next(iter(sets), None)
    return read(run, chosen, phase)


def overview(run: RunInfo, layers: Layers) -> None:
    """The sentence and the key figures."""
    flops = flop_share(layers.ops)
    kinds = modules_by_precision(layers.all_ops)
    casts = sum(site.count for site in cast_sites(layers.ops))
    half_run = layers_words.is_half_precision(run.spec.precision)
    layout.sentence(layers_words.answer(flops, kinds, casts, half_run))
    parameters = parameters_by_dtype(layers.modules)
    total = sum(n for _, n in parameters)
    shown = "none" if flops.half_share is None else percent(flops.half_share)
    layout.key_figures(
        [
            KeyFigure(
                "FLOPs in half", shown, f"{share(flops.half, flops.total)} of counted operations"
            ),
            KeyFigure("Casts a step", count(casts), "Dtype conversions in the chosen phase"),
            KeyFigure(
                "Modules in fp32",
                f"{len(kinds.fp32):,} of {kinds.total:,}",
                "Modules whose own forward ops all computed in fp32, of those that computed",
            ),
            KeyFigure(
                "Parameters",
                _largest(parameters, total),
                "; ".join(f"{dtype}: {share(n, total)}" for dtype, n in parameters),
            ),
        ]
    )


def stored(run: RunInfo, layers: Layers) -> None:
    """The sentence and the tree of a run whose ops are not traced."""
    leaves = sum(m.is_leaf for m in layers.modules)
    layout.sentence(
        f"{plural(leaves, 'module')} with values of their own; which precision each op computed in "
        "is not known, the dtypes of what went in and out are."
    )
    states.no_ops(run)
    tree(layers)


def flops(layers: Layers) -> None:
    """The chart: where the FLOPs are, and in which dtype."""
    names = names_by_index(layers.modules)
    shares = [(names.get(m, "outside the model"), s) for m, s in flops_by_module(layers.ops)]
    layout.see(layers_words.flops_seen(shares, SHOWN_MODULES))
    if not shares:
        return
    top = shares[:SHOWN_MODULES]
    figure = flops_figure.flops_by_module(
        [s for _, s in top], short_names([n for n, _ in top], TICK_LENGTH), [n for n, _ in top]
    )

    def table() -> pd.DataFrame:
        return pd.DataFrame(
            [(n, d, flops) for n, s in shares for d, flops in s.by_dtype],
            columns=["module", "dtype", "flops"],
        )

    chart.show(figure, "flops", table, key="layers-flops")


def tree(layers: Layers) -> None:
    """All modules, searched or folded."""
    st.subheader("Modules", anchor=False)
    deepest = layers_tables.max_depth(layers.rows)
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    with left:
        text = find_box("part of a path or a type")
    depths = list(range(1, deepest + 1)) or [0]
    start = layers_tables.depth_for(layers.rows, UNFOLDED)
    depth = links.slide("Unfold to depth", "depth", depths, default=start, place=right)
    rows = layers_tables.found(layers.rows, text) if text else fold(layers.rows, depth)
    opens = bool(layers.all_ops)  # the section below is of its ops
    layout.see(layers_words.tree_seen(len(rows), len(layers.rows), text, opens=opens))
    layers_tables.module_table(rows, as_tree=not text, key="layers-modules")
    if layers.step is not None:
        st.caption(f"Dtypes of values are those of step {layers.step}.")


def one_module(run: RunInfo, layers: Layers) -> None:
    """Ops of the chosen module."""
    st.subheader("One module", anchor=False)
    names = names_by_index(layers.modules)
    busiest = Counter(op.module for op in layers.ops if not op.is_cast).most_common(1)
    heaviest = [module for module, _ in flops_by_module(layers.ops)] or [m for m, _ in busiest]
    default = heaviest[0] if heaviest else None
    index = pick_module("Module", names, list(names), default)
    ops = [op for op in layers.ops if op.module == index]
    if not ops:
        states.nothing_recorded(
            "This module ran no op of its own in the chosen phase.", "Its children may have."
        )
        return
    layout.see(f"{count(sum(o.count for o in ops))} calls a step of this module's own ops.")
    layers_tables.ops_table(ops, list_lookup(run.machine), key="layers-ops")


def casts(layers: Layers) -> None:
    """Where dtypes change."""
    sites, names = cast_sites(layers.ops), names_by_index(layers.modules)
    with layout.details("Casts: where, from what to what"):
        layout.see(layers_words.casts_seen(sites, names))
        if sites:
            layers_tables.cast_table(sites, names, key="layers-casts")


def in_fp32(run: RunInfo, layers: Layers) -> None:
    """What stayed in fp32 in the forward pass, and why."""
    found = fp32_ops(layers.all_ops, list_lookup(run.machine))
    precision = run.spec.precision
    with layout.details("What stayed in fp32, and why"):
        layout.see(layers_words.fp32_seen(found, precision))
        if found:
            names, reasons = names_by_index(layers.modules), layers_words.reasons(precision)
            layers_tables.fp32_table(found, names, reasons, key="layers-fp32")


def _pick_ops(sets: list[OpSet]) -> OpSet:
    by_id = {s.id: s for s in sets}
    chosen = links.select("Ops of", "ops", list(by_id), format_func=lambda id_: by_id[id_].label)
    return by_id[chosen]


def _largest(parameters: list[tuple[str, int]], total: int) -> str:
    if not parameters:
        return "none"
    dtype, n = parameters[0]
    return dtype if n == total else f"{dtype} {percent(n / total)}"
