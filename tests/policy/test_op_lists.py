"""The table of op lists: counts that are known, and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.launcher.launch import launch
from ampscope.policy.op_lists import MEANINGS, listed_ops, made_on
from ampscope.records import RunSpec, State
from tests.helpers.child_runs import wait_until

Open = Callable[..., AppTest]


def counts(framework: str) -> Counter[tuple[str, str, bool]]:
    found = [o for o in listed_ops() if o.framework.startswith(framework)]
    return Counter((o.where, o.word, bool(o.condition)) for o in found)


def test_counts_are_those_of_the_frameworks() -> None:
    """Counted by hand: Paddle 3.3.1 by asking it, TensorFlow 2.21 in its header."""
    paddle, flow = counts("Paddle"), counts("TensorFlow")
    assert (paddle["fp16 O1", "white", False], paddle["fp16 O1", "black", False]) == (14, 53)
    assert (paddle["fp16 O2", "white", False], paddle["fp16 O2", "black", False]) == (14, 8)
    assert flow == {
        ("fp16 graph", "allow", False): 5,
        ("fp16 graph", "allow", True): 34,
        ("fp16 graph", "infer", False): 43,
        ("fp16 graph", "deny", False): 9,
        ("fp16 graph", "clear", False): 95,
        ("fp16 graph", "clear", True): 15,
    }


@pytest.mark.parametrize(
    ("framework", "where", "op", "meaning"),
    [
        ("PyTorch", "CUDA", "linear", "half"),
        ("PyTorch", "CUDA", "exp", "fp32"),
        ("PyTorch", "CUDA", "binary_cross_entropy", "refused"),
        ("PyTorch", "CUDA", "addcmul", "widest"),
        ("Paddle", "fp16 O1", "conv2d", "half"),
        ("Paddle", "fp16 O1", "acos", "fp32"),
        ("TensorFlow", "fp16 graph", "MatMul", "half"),
        ("TensorFlow", "fp16 graph", "Softmax", "as it comes"),  # though its docs say deny
        ("TensorFlow", "fp16 graph", "Exp", "fp32"),
    ],
)
def test_known_ops(framework: str, where: str, op: str, meaning: str) -> None:
    found = [
        o for o in listed_ops()
        if o.framework.startswith(framework) and (o.where, o.op) == (where, op)
    ]  # fmt: skip
    assert [o.meaning for o in found] == [meaning]
    assert meaning in MEANINGS


def test_the_page_searches_and_shows_what_an_op_did(open_page: Open, store_path: Path) -> None:
    app = open_page("op_lists", op="softmax")
    assert not app.exception
    table = app.dataframe[0].value
    assert set(table["op"].str.lower().str.contains("softmax")) == {True}
    assert made_on() in app.caption[0].value
    run_id = launch(RunSpec("gpt", precision="fp16", steps=2), store_path)
    assert wait_until(store_path, run_id).state is State.FINISHED
    app = open_page("op_lists", beside=run_id, framework="PyTorch 2.13.0")
    assert not app.exception
    table = app.dataframe[0].value.set_index(["where", "op"])["in this run"]
    assert table["CUDA", "linear"].startswith("fp16 × ")
    assert table["CUDA", "softmax.int"].startswith("fp32 × ")
    assert table["CUDA", "acos"] == ""


def test_an_op_in_no_list_is_told(open_page: Open) -> None:
    app = open_page("op_lists", op="there is no such op")
    assert not app.exception
    assert app.subheader[0].value.startswith("No list has such an op")
