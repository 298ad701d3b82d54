"""Lesson 5: which op in which precision. A real step's ops, three frameworks' lists, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from ampscope.policy.op_lists import listed_ops
from ampscope.records import Call, Result
from ampscope.story.palette import dtype_color
from app import chart, links
from app.chart import KeyFigure
from app.ext.lessons import lesson_page
from app.ext.lessons.figures import Bars, stacked_bars
from app.ext.lessons.lesson_page import MeasuredLesson, Setting
from app.ext.lessons.lesson_runs import reading
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.text import count, number

# What a framework calls it in its own list: PyTorch on CUDA, Paddle in fp16 O1, TensorFlow.
KINDS = {
    "matmul": ("matmul", "matmul_v2", "MatMul"),
    "convolution": ("conv2d", "conv2d", "Conv2D"),
    "softmax": ("softmax.int", "softmax", "Softmax"),
    "layer norm": ("layer_norm", "layer_norm", ""),
    "loss of classes": ("nll_loss", "softmax_with_cross_entropy", "SoftmaxCrossEntropyWithLogits"),
    "exp": ("exp", "exp", "Exp"),
    "sum": ("sum", "reduce_sum", "Sum"),
    "ReLU": ("relu", "relu", "Relu"),
}
UNLISTED = {  # what becomes of an op that stands in no list
    "PyTorch": "as it comes",
    "Paddle": "fp32 if one input is",
    "TensorFlow": "stays in fp32",
}
PLACES = (("PyTorch", "CUDA"), ("Paddle", "fp16 O1"), ("TensorFlow", "fp16 graph"))
QUIET = ("view", "t", "detach", "transpose", "expand", "_unsafe_view", "reshape", "slice", "select",
         "as_strided", "permute", "unsqueeze", "squeeze", "empty_like", "clone")  # fmt: skip
MOST = 14  # ops drawn
MATMULS = ("mm", "addmm", "bmm", "convolution")
CAREFUL = ("_softmax", "nll_loss_forward")  # softmax, and the loss of classes
INNER = "_log_softmax"  # of cross_entropy


def answer(results: Sequence[Result]) -> Answer:
    """By the dtypes that the matmuls, softmax and the loss put out in the traced step."""
    careful = _dtypes(results, CAREFUL)
    matmuls = _dtypes(results, MATMULS)
    half, full = matmuls["fp16"], careful["fp32"]
    choice = 0 if careful["fp16"] and half else 1 if half and full else 2
    return Answer(
        choice,
        f"In the traced step {count(half)} of {count(matmuls.total())} matmuls put out fp16, and "
        f"{count(full)} of {count(careful.total())} softmaxes and losses fp32.",
    )


def draw(results: Sequence[Result]) -> None:
    """The step, the lists, the reasons."""
    calls = _forward(results)
    by_dtype: Counter[str] = Counter()
    for call in calls:
        by_dtype[_first(call)] += call.count
    casts = sum(c.count for c in results if isinstance(c, Call) and c.op == "_to_copy")
    chart.key_figures(
        [
            KeyFigure("Forward ops in fp16", count(by_dtype["fp16"])),
            KeyFigure("in fp32", count(by_dtype["fp32"])),
            KeyFigure("Casts in the step", count(casts), "Forward and backward."),
        ]
    )
    text = f"Ops of the forward pass by the dtype that they put out; the {MOST} most frequent."
    lesson_page.show_chart(bars(calls), "lesson-ops", call_table(results), text)
    chart.see("The lists by which three frameworks decide:")
    st.dataframe(lists(), hide_index=True, key="lesson-ops-lists")
    st.page_link(links.OP_LISTS.file, label="All lists", icon=links.OP_LISTS.icon)
    chart.see(reasons(results))
    if _dtypes(results, (INNER,))["fp16"]:
        chart.see(
            "The log-softmax inside cross_entropy put out fp16 in this step: cross_entropy names "
            "that dtype itself, and a list leaves alone what is named."
        )


def reasons(results: Sequence[Result]) -> str:
    """Why, measured."""
    parts = []
    for name, what in (
        ("exp(12)", "exp of 12, an ordinary score,"),
        ("4,096 × 8²", "the sum of 4,096 squares of 8, as in a norm,"),
        ("-log(softmax)", "the loss of a class with probability 2e-9"),
    ):
        half, full = reading(results, name, "fp16"), reading(results, name, "fp32")
        shown = f"{full:,.6g}" if math.isfinite(full) else number(full)
        parts.append(f"{what} is {number(half)} in fp16 and {shown} in fp32")
    return f"Why, measured: {'; '.join(parts)}."


def bars(calls: Sequence[Call]) -> go.Figure:
    """Calls an op and dtype."""
    totals: Counter[str] = Counter()
    for call in calls:
        totals[call.op] += call.count
    names = [name for name, _ in totals.most_common(MOST)]
    parts = []
    for dtype, pattern in (("fp16", ""), ("fp32", "/"), ("other", ".")):
        amount = Counter[str]()
        for call in calls:
            kind = _first(call) if _first(call) in ("fp16", "fp32") else "other"
            amount[call.op] += call.count if kind == dtype else 0
        if any(amount[name] for name in names):
            parts.append(Bars(dtype, [amount[n] for n in names], dtype_color(dtype), pattern))
    return stacked_bars(names, parts, x_title="calls in the forward pass", height=440)


def lists() -> pd.DataFrame:
    """What each framework's list says of each kind of op."""
    known = {(o.framework.split()[0], o.where, o.op): o.meaning for o in listed_ops()}
    rows = []
    for kind, names in KINDS.items():
        row = {"op": kind}
        for (framework, where), name in zip(PLACES, names, strict=True):
            row[f"{framework}, {where}"] = known.get((framework, where, name), UNLISTED[framework])
        rows.append(row)
    return pd.DataFrame(rows)


def call_table(results: Sequence[Result]) -> pd.DataFrame:
    """Every op of the step."""
    calls = [r for r in results if isinstance(r, Call)]
    return pd.DataFrame(
        [(c.op, c.phase, c.inputs, c.outputs, c.count) for c in calls],
        columns=["op", "phase", "inputs", "outputs", "calls"],
    )


def _forward(results: Sequence[Result]) -> list[Call]:
    calls = (r for r in results if isinstance(r, Call) and r.phase == "forward")
    return [c for c in calls if c.op not in QUIET and c.outputs and c.op != "_to_copy"]


def _dtypes(results: Sequence[Result], ops: Sequence[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for call in _forward(results):
        if call.op in ops:
            found[_first(call)] += call.count
    return found


def _first(call: Call) -> str:
    return call.outputs.partition(",")[0]


CODE = {
    "PyTorch": """
with torch.autocast("cuda", dtype=torch.float16):
    scores = q @ k.mT                           # fp16
    weights = scores.softmax(-1)                # fp32: exp overflows early
    with torch.autocast("cuda", enabled=False): # an op of your own that needs fp32
        norm = x.float().square().mean()
""",
    "Paddle": """
with paddle.amp.auto_cast(
    dtype="float16", custom_white_list={"elementwise_add"}, custom_black_list={"reduce_sum"}
):
    weights = paddle.nn.functional.softmax(paddle.matmul(q, k, transpose_y=True))
""",
    "Keras": """
keras.mixed_precision.set_global_policy("mixed_float16")
outputs = keras.layers.Dense(10)(hidden)                            # computes in fp16
outputs = keras.layers.Activation("softmax", dtype="float32")(outputs)
""",
}
LESSON = MeasuredLesson(
    id="ops",
    question="Under fp16 autocast, in which precision do matmuls run, and in which the loss?",
    choices=("Both in fp16", "Matmuls in fp16, the loss in fp32", "Both in fp32"),
    answer=answer,
    draw=draw,
    settings={"model": Setting("Model", {"gpt": "GPT", "resnet": "ResNet"})},
    terms=("autocast", "half precision", "overflow"),
    code_note="Keras decides by layer, not by op: a layer's dtype is what it computes in.",
    code=CODE,
    sources=(Source.TORCH_AMP, Source.PADDLE, Source.KERAS, Source.PAPER),
)
