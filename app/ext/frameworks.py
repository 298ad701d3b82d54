"""The page Frameworks: start one network in every framework, compare the runs, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st

from ampscope.errors import AmpscopeError
from ampscope.ext.frameworks import FRAMEWORKS
from ampscope.ext.frameworks.checks import PRECISIONS
from ampscope.ext.frameworks.differences import (
    HIGHEST,
    LOWEST,
    SAME,
    LayerDifference,
    LayerSeen,
    differences,
    layers,
)
from ampscope.ext.frameworks.networks import SHARED
from ampscope.numerics.formats import FORMATS
from ampscope.pythons import TORCH, find_python, why_missing
from ampscope.records import Machine, Role, RunInfo, RunSpec, State
from ampscope.story.run_words import rules
from app import chart, links, permissions, states, store
from app.chart import KeyFigure
from app.ext.figures import framework_lines
from app.runs import actions
from app.text import code, escape, number, percent, plural, power_of_two

STEPS = 10
_HELP = (
    "fp16: PyTorch's autocast with GradScaler, Keras' mixed_float16, Paddle's auto_cast O1 with "
    "GradScaler. On a CPU PyTorch rehearses CUDA's lists, Keras computes in half itself, and "
    "Paddle, which switches AMP off on a CPU, is emulated by rounding after its own lists."
)
TITLES = {"torch": "PyTorch", "keras": "Keras", "paddle": "Paddle"}
ROLES = {
    Role.ACTIVATION: "activations",
    Role.GRAD_OUTPUT: "gradients of outputs",
    Role.WEIGHT_GRAD: "weight gradients",
    Role.WEIGHT: "weights",
}
_ENDED = {**states.ENDED, State.FINISHED: "recorded no layer"}


def show_form() -> str:
    """The form; the group's name when runs were started, else ""."""
    if not permissions.offers("training in several frameworks"):
        return ""
    missing = {name: why for name in FRAMEWORKS if (why := why_missing(name))}
    here = [TORCH, *(name for name in FRAMEWORKS if name not in missing)]
    left, middle, right = st.columns(3, vertical_alignment="bottom")
    network = left.selectbox(
        "Network", list(SHARED), format_func=lambda n: n.removeprefix("shared-"), key="fw-network"
    )
    chart.see(SHARED[str(network)])
    precision = middle.selectbox("Precision", PRECISIONS, index=1, key="fw-precision", help=_HELP)
    steps = right.number_input("Steps", 1, 200, STEPS, key="fw-steps")
    for name, why in missing.items():
        if find_python(FRAMEWORKS[name]) is not None:  # a variable that leads nowhere
            st.caption(escape(why))
            continue
        st.caption(
            f"{FRAMEWORKS[name].title} is not on this machine. In a terminal: "
            + code(f"ampscope frameworks install {name}")
        )
    if not st.button(f"Train in {plural(len(here), 'framework')}", type="primary", key="fw-start"):
        return ""
    try:
        return actions.start(
            [
                RunSpec(
                    workload=str(network),
                    precision=str(precision),
                    steps=int(steps),
                    framework=name,
                    label=f"{str(network).removeprefix('shared-')} {precision} in {name}",
                )
                for name in here
            ]
        )
    except AmpscopeError as error:
        states.unreadable(str(error))
        return ""


def pick_group() -> str:
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


def nothing_trained() -> None:
    """Nothing yet: what this page is for and what to do."""
    states.nothing_recorded(
        "No network has been trained in several frameworks yet.",
        "Choose one below: each framework starts with the same weights and sees the same batches.",
    )


def show_differences(runs: Sequence[RunInfo]) -> None:
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
    name = TITLES[first.spec.framework]
    found = {
        r.id: differences(seen[first.id], seen[r.id], (name, TITLES[r.spec.framework]))
        for r in done[1:]
    }
    ended = unfinished(runs, done)
    chart.sentence(
        "; ".join(_answer(first, done[1:], found) + [difference_words(r, r in done) for r in ended])
        + "."
    )
    for run in filter(lambda run: run.message, ended):
        st.caption(f"{TITLES[run.spec.framework]}: {escape(run.message)}")
    chart.key_figures([_figure(run) for run in done])
    st.dataframe(module_facts(done), key="fw-facts")
    apart = [d for every in found.values() for d in every]
    worst = max(apart, key=lambda d: d.moved, default=None)
    _one_layer(done, seen, role, worst.path if worst else "")
    with chart.details("All layers, and why they differ"):
        table = differences_table(first, done[1:], found)
        chart.table(table, "framework-differences", key="fw-differences")


def unfinished(runs: Sequence[RunInfo], compared: Sequence[RunInfo]) -> list[RunInfo]:
    """The newest run of each framework that is not compared, and runs that are and ended early."""
    of = {run.spec.framework: run for run in sorted(runs, key=lambda run: run.created)}
    of |= {run.spec.framework: run for run in compared}
    return [run for run in of.values() if run not in compared or run.state is not State.FINISHED]


def difference_words(run: RunInfo, is_compared: bool) -> str:
    """How it ended, as part of the page's sentence."""
    after = f" after {plural(run.steps_done, 'step')}" if run.steps_done else ""
    ended = _ENDED.get(run.state, run.state.value) + after
    return f"{TITLES[run.spec.framework]} {ended}" + ("" if is_compared else ": not compared")


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
    chart.see(_seen(path, shown))
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
    seen = "Where curves overlap, the counts are equal."
    return f"{path}: {'; '.join(parts)}. {seen}"


def module_facts(runs: Sequence[RunInfo]) -> pd.DataFrame:
    """What each run was: half precision real or emulated, scaler real or forced, scale, skips."""
    rows = {}
    for run in runs:
        steps, machine = store.steps(run), run.machine
        scale = steps[0].scale
        scaler = "none" if scale is None else "real"
        rows[TITLES[run.spec.framework]] = {
            "software": machine.software if machine else "unknown",
            "half precision": _arithmetic(machine) if machine else "unknown",
            "rules": rules(run),
            "loss scaler": (machine.scaler if machine else "") or scaler,
            "first loss scale": "none" if scale is None else power_of_two(scale),
            "skipped steps": f"{store.totals(run).skipped} of {store.totals(run).steps}",
            "first loss": number(steps[0].loss),
            "last loss": number(steps[-1].loss),
        }
    return pd.DataFrame(rows)


def _arithmetic(machine: Machine) -> str:
    if machine.framework == "torch" and machine.policy == "rehearsal":
        return "half in, fp32 sum, half out"
    if machine.arithmetic == "emulated":
        return "emulated: fp32 numbers rounded to half"
    return "real, by this device's kernels"


def bins_table(shown: Mapping[str, LayerSeen]) -> pd.DataFrame:
    """Counts by power of two, a column each framework."""
    names = [*(str(e) for e in range(LOWEST, HIGHEST + 1)), "zero", "not finite"]
    frame = pd.DataFrame({"exponent": names, **{n: s.counts for n, s in shown.items()}})
    return frame[frame[list(shown)].sum(axis=1) > 0]


def differences_table(
    first: RunInfo, others: Sequence[RunInfo], found: Mapping[str, list[LayerDifference]]
) -> pd.DataFrame:
    """All layers that both have, the most different first."""
    rows = [
        {
            "layer": d.path,
            "framework": TITLES[run.spec.framework],
            f"dtype in {TITLES[first.spec.framework]}": d.first.dtype,
            "dtype there": d.second.dtype,
            "in another power of two": f"{100 * d.moved:.2f} %",
            "why": d.why,
        }
        for run in others
        for d in sorted(found[run.id], key=lambda d: -d.moved)
    ]
    return pd.DataFrame(rows)
