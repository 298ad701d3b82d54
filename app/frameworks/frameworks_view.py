"""Runs of one network in several frameworks: what is the same, what differs, and why."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from ampscope.analysis.framework_differences import (
    SAME,
    LayerDifference,
    LayerSeen,
    differences,
    layers,
)
from ampscope.formats import FORMATS
from ampscope.records import Role, RunInfo
from app import chart, layout, links, states, store
from app.figures.framework_lines import framework_lines
from app.frameworks.frameworks_tables import TITLES, bins_table, differences_table, facts
from app.frameworks.unfinished import unfinished, words
from app.layout import KeyFigure
from app.text import escape, number, percent, plural

ROLES = {
    Role.ACTIVATION: "activations",
    Role.GRAD_OUTPUT: "gradients of outputs",
    Role.WEIGHT_GRAD: "weight gradients",
    Role.WEIGHT: "weights",
}


def pick() -> str:
    """The group that the address names, or the newest with more than one framework; else ""."""
    groups: dict[str, list[RunInfo]] = {}
    for run in store.runs():
        if run.spec.workload.startswith("shared-") and run.spec.group:
            groups.setdefault(run.spec.group, []).append(run)
    known = [g for g, runs in groups.items() if len({r.spec.framework for r in runs}) > 1]
    wanted = links.wanted("frameworks")
    if wanted in groups and wanted not in known:
        known.insert(0, wanted)
    if not known:
        return ""
    return links.select(
        "Comparison", "frameworks", known, format_func=lambda g: _label(groups[g]),
        writes_default=False,
    )  # fmt: skip


def empty() -> None:
    """Nothing yet: what this page is for and what to do."""
    states.nothing_recorded(
        "No network has been trained in several frameworks yet.",
        "Choose one below: each framework starts with the same weights and sees the same batches.",
    )


def show(runs: Sequence[RunInfo]) -> None:
    """The answer, each framework's figures, one layer's histograms, and all differences."""
    done = _newest([run for run in runs if run.steps_done and store.modules(run)])
    if len(done) < 2:
        states.nothing_recorded(
            "Fewer than two frameworks have recorded anything.",
            "The line of each run above says why; ampscope frameworks check tells more.",
        )
        return
    role, step = _where(done)
    seen = {run.id: _layers(run, role, step) for run in done}
    first = done[0]
    found = {r.id: differences(seen[first.id], seen[r.id], _names(first, r)) for r in done[1:]}
    ended = unfinished(runs, done)
    layout.sentence(
        "; ".join(_answer(first, done[1:], found) + [words(r, r in done) for r in ended]) + "."
    )
    for run in filter(lambda run: run.message, ended):
        st.caption(f"{TITLES[run.spec.framework]}: {escape(run.message)}")
    layout.key_figures([_figure(run) for run in done])
    st.dataframe(facts(done), key="fw-facts")
    apart = [d for every in found.values() for d in every]
    worst = max(apart, key=lambda d: d.moved, default=None)
    _one_layer(done, seen, role, worst.path if worst else "")
    with layout.details("All layers, and why they differ"):
        table = differences_table(first, done[1:], found)
        st.dataframe(table, hide_index=True)
        chart.download(lambda: table, "framework-differences", key="fw-differences")


def _newest(runs: Sequence[RunInfo]) -> list[RunInfo]:
    """One run of each framework; of several, the newest, and a line says so."""
    of: dict[str, RunInfo] = {}
    for run in sorted(runs, key=lambda run: run.created):
        of[run.spec.framework] = run
    left = [run for run in runs if run not in of.values()]
    if left:
        names = ", ".join(escape(run.id) for run in left)
        st.caption(f"Of each framework the newest run is compared; left out: {names}.")
    return [run for run in runs if run in of.values()]


def _label(runs: Sequence[RunInfo]) -> str:
    names = " and ".join(sorted({TITLES[r.spec.framework] for r in runs}))
    spec = runs[0].spec
    return f"{spec.workload.removeprefix('shared-')} {spec.precision} in {names} ({spec.group})"


def _where(runs: Sequence[RunInfo]) -> tuple[Role, int]:
    """Role and step, both in the address; step 0 is where the weights are still the same."""
    role = links.pick(
        "Compare", "role", list(ROLES), format_func=lambda r: ROLES[r], default=Role.ACTIVATION
    )
    common = set.intersection(*(set(store.frame_steps(run, role)) for run in runs))
    steps = sorted(common) or [0]
    return role, links.slide("Step", "step", steps, help="At step 0 all weights are the same.")


def _layers(run: RunInfo, role: Role, step: int) -> dict[str, LayerSeen]:
    frame = store.frame(run, role, step)
    if frame is None:
        return {}
    return layers(frame, {m.index: m.path for m in store.modules(run)})


def _answer(
    first: RunInfo, others: Sequence[RunInfo], found: dict[str, list[LayerDifference]]
) -> list[str]:
    parts = []
    for run in others:
        apart = [d for d in found[run.id] if d.moved > SAME or d.first.dtype != d.second.dtype]
        total = plural(len(found[run.id]), "layer")
        if not found[run.id]:
            parts.append(f"{TITLES[run.spec.framework]} has no layer to compare")
        elif apart:
            worst = max(apart, key=lambda d: d.moved)
            parts.append(
                f"{TITLES[run.spec.framework]} differs from {TITLES[first.spec.framework]} in "
                f"{len(apart)} of {total}, most in {worst.path} ({worst.why})"
            )
        else:
            parts.append(f"{TITLES[run.spec.framework]} is the same in all of {total}")
    return parts


def _names(first: RunInfo, other: RunInfo) -> tuple[str, str]:
    return TITLES[first.spec.framework], TITLES[other.spec.framework]


def _figure(run: RunInfo) -> KeyFigure:
    last = store.steps(run)[-1]
    software = run.machine.software if run.machine else ""
    return KeyFigure(f"Loss in {TITLES[run.spec.framework]}", number(last.loss), software)


def _one_layer(
    runs: Sequence[RunInfo], seen: dict[str, dict[str, LayerSeen]], role: Role, worst: str
) -> None:
    common = [path for path in seen[runs[0].id] if all(path in seen[r.id] for r in runs)]
    if not common:
        states.nothing_recorded("No layer has histograms in all of them at this step.", "")
        return
    start = worst if worst in common else common[0]
    path = links.select("Layer", "layer", common, default=start, writes_default=False)
    shown = {TITLES[run.spec.framework]: seen[run.id][path] for run in runs}
    layout.see(_seen(path, shown))
    fmt = FORMATS["bf16" if runs[0].spec.precision == "bf16" else "fp16"]
    title = "magnitude, unscaled" if role.is_gradient else "magnitude"
    chart.show(
        framework_lines(shown, fmt, x_title=title),
        "frameworks",
        lambda: bins_table(shown),
        key="fw-layer",
    )


def _seen(path: str, shown: dict[str, LayerSeen]) -> str:
    parts = [
        f"{name} {layer.dtype}, {percent(layer.counts[-2] / max(layer.total, 1))} zero"
        + (f", {layer.counts[-1]:,} not finite" if layer.counts[-1] else "")
        for name, layer in shown.items()
    ]
    seen = "Where lines lie on each other, as many elements have that magnitude."
    return f"{path}: {'; '.join(parts)}. {seen}"
