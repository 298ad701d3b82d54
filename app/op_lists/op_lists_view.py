"""The table of autocast's op lists: three frameworks, common words, and what an op did in a run."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import streamlit as st

from ampscope.policy.op_lists import MEANINGS, ListedOp, listed_ops, made_on
from ampscope.records import RunInfo
from ampscope.store.reader import Reader
from app import chart, layout, links, store
from app.runs import run_page

ANY = "any"
NO_RUN = "no run"
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


def show() -> None:
    """Filters, the table, and where the lists come from."""
    rows, did = _chosen(), _in_run()
    layout.sentence(_answer(rows))
    frame = pd.DataFrame(
        {
            "framework": [o.framework for o in rows],
            "where": [o.where for o in rows],
            "op": [o.op for o in rows],
            "runs in": [o.meaning for o in rows],
            "its own word": [f"{o.word}, {o.condition}" if o.condition else o.word for o in rows],
            **({"in this run": [_did(o, did) for o in rows]} if did is not None else {}),
        }
    )
    st.dataframe(frame, hide_index=True, height=560)
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
    """What each op did in a run that somebody chose; None without one."""
    runs = {run.id: run for run in store.trainings() if run.spec.kind != "watch"}
    if not runs:
        return None
    chosen = links.select(
        "Beside it: what the op did in a run", "beside", [NO_RUN, *runs],
        format_func=lambda i: i if i == NO_RUN else run_page.label(runs[i]), writes_default=False,
    )  # fmt: skip
    return None if chosen == NO_RUN else traced(runs[chosen])


def traced(run: RunInfo) -> dict[str, Counter[str]]:
    """Op without its namespace -> dtypes of its results -> calls, of one traced step."""
    return _traced(run)


@store.of_run
def _traced(reader: Reader, run_id: str) -> dict[str, Counter[str]]:
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
