"""The page Op lists: the table of three frameworks, common words, and what an op did in a run; and
what if an op were on the other list: two probes, as the lists are and changed, side by side.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace

import pandas as pd
import streamlit as st

from ampscope.control import LISTS, Control
from ampscope.errors import BadInput
from ampscope.policy.op_lists import (
    MEANINGS,
    ListedOp,
    listed_ops,
    made_on,
)
from ampscope.records import Role, RunInfo, RunSpec, StepRecord
from ampscope.store.reader import Reader
from app import chart, links, permissions, states, store
from app.runs import actions, run_page, workload_choice
from app.text import number, percent

ANY = "any"
NO_RUN = "no run"
OP_PX = 300  # 40 letters; one name is longer
# A call of one of these reaches the place where ops are traced, below autocast, under other names.
TRACED_AS = {
    "linear": ("addmm", "mm"),
    "matmul": ("mm", "bmm", "mv", "dot"),
    "einsum": ("bmm",),
    "conv1d": ("convolution",),
    "conv2d": ("convolution",),
    "conv3d": ("convolution",),
    "layer_norm": ("native_layer_norm",),
    "group_norm": ("native_group_norm",),
    "softmax": ("_softmax",),
    "log_softmax": ("_log_softmax",),
}
STEPS = 30
PRECISIONS = ("fp16", "bf16")
_OP_HELP = "As autocast's lists name it; any other op of torch can be typed."
_HELP = (
    "half: inputs are cast to half. fp32: to fp32. widest: to the widest dtype among them. "
    "as it comes: the op takes what it is given."
)


def show_lists() -> None:
    """Filters, the table, and where the lists come from."""
    rows, did = _chosen(), _in_run()
    chart.sentence(_answer(rows))
    frame = pd.DataFrame(
        {
            "op": [o.op for o in rows],
            "runs in": [o.meaning for o in rows],
            "framework": [o.framework for o in rows],
            "where": [o.where for o in rows],
            "its own word": [f"{o.word}, {o.condition}" if o.condition else o.word for o in rows],
            **({"in this run": [_did(o, did) for o in rows]} if did is not None else {}),
        }
    )
    columns = {
        "op": st.column_config.TextColumn(width=OP_PX),
        "runs in": st.column_config.TextColumn(help=_HELP),
        "its own word": st.column_config.TextColumn(help="What the framework calls that list."),
    }
    st.dataframe(frame, hide_index=True, height=560, column_config=columns)
    chart.download(lambda: frame, "op-lists", key="op-lists")
    st.caption(
        "PyTorch's lists are those that ampscope rehearses on a CPU. Paddle's and TensorFlow's "
        f"were read from the installed frameworks on {made_on()}. An op that stands in no list: "
        "in PyTorch it runs in the dtype that its inputs have; in Paddle (grey) in fp32 as soon as "
        "one input is fp32; TensorFlow's rewrite leaves it in fp32. Keras decides by layer and has "
        "no list."
    )


def _chosen() -> list[ListedOp]:
    names = list(dict.fromkeys(o.framework for o in listed_ops()))
    left, middle, right = st.columns((3, 2, 2), vertical_alignment="bottom")
    text = left.text_input("Search", links.wanted("op"), placeholder="softmax", key="op-search")
    links.keep("op", text.strip() or None)
    framework = links.select(
        "Framework", "framework", [ANY, *names], place=middle, writes_default=False
    )
    meaning = links.select(
        "Runs in", "meaning", [ANY, *MEANINGS], place=right, writes_default=False
    )
    return [
        o
        for o in listed_ops()
        if text.strip().lower() in o.op.lower()
        and framework in (ANY, o.framework)
        and meaning in (ANY, o.meaning)
    ]


def _answer(rows: list[ListedOp]) -> str:
    if not rows:
        text = links.wanted("op").lower()
        if any(text in o.op.lower() for o in listed_ops()):
            return "Lists have such an op, but not in the framework or dtype that was chosen."
        return "No list has such an op."
    counts = Counter(o.meaning for o in rows)
    parts = [f"{counts[m]:,} {m}" for m in MEANINGS if counts[m]]
    return f"{len(rows):,} entries of {len({o.framework for o in rows})} frameworks: " + ", ".join(
        parts
    )


def _in_run() -> dict[str, Counter[str]] | None:
    """What each op did in a run that the user chose; None without one."""
    runs = {run.id: run for run in store.trainings() if run.spec.kind != "watch"}
    if not runs:
        return None
    chosen = links.select(
        "Beside it: what the op did in a run", "beside", [NO_RUN, *runs],
        format_func=lambda i: i if i == NO_RUN else run_page.label(runs[i]), writes_default=False,
    )  # fmt: skip
    return None if chosen == NO_RUN else traced(runs[chosen])


@store.of_run
def traced(reader: Reader, run_id: str) -> dict[str, Counter[str]]:
    """Op without its namespace -> dtypes of its results -> calls, of one traced step."""
    sets = {s.op_set for s in reader.steps(run_id) if s.op_set is not None}
    found: dict[str, Counter[str]] = {}
    for op in reader.ops(run_id, min(sets)) if sets else []:
        name = op.op.rpartition(".")[2]
        found.setdefault(name, Counter())[op.outputs.partition(",")[0]] += op.count
    return found


def _did(listed: ListedOp, did: dict[str, Counter[str]]) -> str:
    if not listed.framework.startswith("PyTorch"):
        return ""
    return results_of(listed.op.partition(".")[0], did)


def results_of(op: str, did: dict[str, Counter[str]]) -> str:
    """Dtypes of an op's results with how often: ``fp16 × 12``; "" when it did not run."""
    total: Counter[str] = Counter()
    for name in TRACED_AS.get(op, (op,)):
        total += did.get(name, Counter())
    return ", ".join(f"{dtype} × {count:,}" for dtype, count in total.most_common())


def show_whatif() -> None:
    """The form, the two runs while they go on, and what came of them."""
    st.subheader("What if an op were on another list?", anchor=False)
    group = links.wanted("whatif")
    runs = actions.show_progress(group, key="whatif") if group else []
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
    choice = workload_choice.pick_workload(RunSpec(workload="gpt"))
    if st.button("Run both ways", type="primary", key="wi-start"):
        try:
            named = workload_choice.named(choice)
            plain = RunSpec(workload=named, size=choice.size, steps=STEPS)
            plain = replace(plain, precision=precision or PRECISIONS[0])
            changed = replace(plain, control=Control.of(op_lists={str(op): str(name)}))
            links.keep("whatif", actions.start([plain, changed]))
        except BadInput as error:
            states.unreadable(str(error))
            return
        st.rerun()


def _compared(runs: list[RunInfo]) -> None:
    plain = next((r for r in runs if not r.spec.control), None)
    changed = next((r for r in runs if r.spec.control), None)
    if plain is None or changed is None or not (plain.steps_done and changed.steps_done):
        return
    rows = [_facts(run, changed) for run in (plain, changed)]
    chart.see(_whatif_answer(changed, store.steps(plain), store.steps(changed)))
    frame = pd.DataFrame(rows, index=["unchanged lists", changed.spec.mode])
    st.dataframe(frame.T, key="whatif-facts")
    chart.download(lambda: frame.reset_index(), "op-list-change", key="whatif")


def _whatif_answer(changed: RunInfo, own: list[StepRecord], other: list[StepRecord]) -> str:
    changes = Control(changed.spec.control).list_changes
    what = ", ".join(f"{op} in {name}" for op, name in changes.items())
    ends = number(own[-1].loss), number(other[-1].loss)
    skips = sum(s.skipped for s in own), sum(s.skipped for s in other)
    return (
        f"With {what}, the loss after {len(other)} steps is {ends[1]}, and {ends[0]} with the "
        f"unchanged lists; {skips[1]} steps were skipped, and {skips[0]}. One seed: a small "
        "difference may be rounding alone."
    )


def _facts(run: RunInfo, changed: RunInfo) -> dict[str, str]:
    steps, did = store.steps(run), traced(run)
    times = [s.step_time_s for s in steps[1:] if s.step_time_s]
    facts = {
        "first loss": number(steps[0].loss),
        "last loss": number(steps[-1].loss),
        "skipped steps": f"{sum(s.skipped for s in steps)} of {len(steps)}",
        "gradients lost against fp32": _lost(run),
        "median step": _median(times, run),
    }
    for op in Control(changed.spec.control).list_changes:
        facts[f"{op} gave"] = results_of(op, did) or "did not run"
    return facts


def _median(times: list[float], run: RunInfo) -> str:
    rehearsed = run.machine is not None and run.machine.policy == "rehearsal"
    where = " on this CPU, not CUDA's" if rehearsed else ""
    return f"{1000 * statistics.median(times):,.1f} ms{where}" if times else "not measured"


def _lost(run: RunInfo) -> str:
    total = lost = below = 0
    for step in {s.step for s in store.steps(run)}:
        for record in store.shadows(run, Role.GRAD_OUTPUT, step):
            total, lost = total + record.total, lost + record.lost
            below += record.below_range
    if not total:
        return "no shadow"
    split = f" ({percent(below / total)} below range)" if lost else ""
    return percent(lost / total) + split
