"""What if an op were on the other list? Two probes, as the lists are and changed, side by side."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pandas as pd
import streamlit as st

from ampscope.errors import BadInput
from ampscope.policy.list_changes import LISTS, changes_of, control
from ampscope.policy.op_lists import listed_ops
from ampscope.records import Role, RunInfo, RunSpec, StepRecord
from app import chart, layout, links, permissions, states, store
from app.op_lists import op_lists_view
from app.runs import live, probes, workload_choice
from app.text import number, percent

STEPS = 30
PRECISIONS = ("fp16", "bf16")


def show() -> None:
    """The form, the two runs while they go on, and what came of them."""
    st.subheader("What if an op were on another list?", anchor=False)
    group = links.wanted("whatif")
    runs = live.panel(group, key="whatif") if group else []
    if runs and not any(run.state.is_active for run in runs):
        _compared(runs)
    with st.expander("Try a change", expanded=not runs):
        _form()


def _form() -> None:
    if not permissions.offers("trying other lists"):
        return
    ops = sorted({o.op.partition(".")[0] for o in listed_ops() if o.framework.startswith("PyTor")})
    left, middle, right = st.columns(3, vertical_alignment="bottom")
    start = ops.index("softmax")
    op = left.selectbox("Op", ops, start, key="wi-op", accept_new_options=True, help=_OP_HELP)
    name = middle.selectbox("runs in", LISTS, key="wi-list", help=_HELP)
    precision = right.segmented_control("Autocast to", PRECISIONS, default="fp16", key="wi-dtype")
    choice = workload_choice.draw(RunSpec(workload="gpt"))
    if st.button("Run both ways", type="primary", key="wi-start"):
        try:
            named = workload_choice.named(choice)
            plain = RunSpec(workload=named, size=choice.size, steps=STEPS)
            plain = replace(plain, precision=precision or PRECISIONS[0])
            changed = replace(plain, control=control({str(op): str(name)}))
            links.keep("whatif", probes.start([plain, changed]))
        except BadInput as error:
            states.unreadable(str(error))
            return
        st.rerun()


_OP_HELP = "As autocast's lists name it; any other op of torch can be typed."
_HELP = (
    "half: inputs are cast to half. fp32: to fp32. widest: to the widest dtype among them. "
    "as it comes: the op takes what it is given."
)


def _compared(runs: list[RunInfo]) -> None:
    plain = next((r for r in runs if not r.spec.control), None)
    changed = next((r for r in runs if r.spec.control), None)
    if plain is None or changed is None or not (plain.steps_done and changed.steps_done):
        return
    rows = [_facts(run, changed) for run in (plain, changed)]
    layout.see(_answer(changed, store.steps(plain), store.steps(changed)))
    frame = pd.DataFrame(rows, index=["lists as they are", changed.spec.mode])
    st.dataframe(frame.T, key="whatif-facts")
    chart.download(lambda: frame.reset_index(), "op-list-change", key="whatif")


def _answer(changed: RunInfo, own: list[StepRecord], other: list[StepRecord]) -> str:
    what = ", ".join(f"{op} in {name}" for op, name in changes_of(changed.spec.control).items())
    ends = number(own[-1].loss), number(other[-1].loss)
    skips = sum(s.skipped for s in own), sum(s.skipped for s in other)
    return (
        f"With {what}, the loss after {len(other)} steps is {ends[1]}, and {ends[0]} with the "
        f"lists as they are; {skips[1]} steps were skipped, and {skips[0]}. One seed: a small "
        "difference may be rounding alone."
    )


def _facts(run: RunInfo, changed: RunInfo) -> dict[str, str]:
    steps, did = store.steps(run), op_lists_view.traced(run)
    times = [s.step_time_s for s in steps[1:] if s.step_time_s]
    facts = {
        "first loss": number(steps[0].loss),
        "last loss": number(steps[-1].loss),
        "skipped steps": f"{sum(s.skipped for s in steps)} of {len(steps)}",
        "gradients lost against fp32": _lost(run),
        "median step": f"{1000 * statistics.median(times):,.1f} ms" if times else "not measured",
    }
    for op in changes_of(changed.spec.control):
        facts[f"{op} gave"] = op_lists_view.results_of(op, did) or "did not run"
    return facts


def _lost(run: RunInfo) -> str:
    total = lost = below = 0
    is_split = True
    for step in {s.step for s in store.steps(run)}:
        for record in store.shadows(run, Role.GRAD_OUTPUT, step):
            total, lost = total + record.total, lost + record.lost
            below += record.below_range or 0
            is_split = is_split and record.below_range is not None
    if not total:
        return "no shadow"
    split = f" ({percent(below / total)} below range)" if lost and is_split else ""
    return percent(lost / total) + split
