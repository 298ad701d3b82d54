"""Budgets: the table, each measure against counts made by hand."""

from __future__ import annotations

import pytest

from ampscope.errors import BadInput
from ampscope.ext.budget import budgets
from ampscope.ext.budget.budgets import Budgets, Island, budgets_of
from ampscope.observations import LineUse, SourceText
from tests.helpers.evidence_making import fp32_run, run, steps


def test_a_table_is_read() -> None:
    table = {"lost_gradients": 0.01, "new_fp32_islands": 0}
    assert budgets_of(table, "p") == Budgets(0.01, 0, None)
    assert budgets_of(table, "p").need_base == ("new_fp32_islands",)


@pytest.mark.parametrize(
    "table",
    [{"loss": 1}, {"step_time_ratio": "1.1"}, {"step_time_ratio": True}, {}, 3,
     {"lost_gradients": float("nan")}, {"lost_gradients": -1}],
)  # fmt: skip
def test_a_table_that_is_none(table: object) -> None:
    with pytest.raises(BadInput, match="budget"):
        budgets_of(table, "pyproject.toml")


def test_lost_gradients_are_zero_here_and_not_in_fp32() -> None:
    own = run(steps([1.0, 1.0], grad_total=1000, grad_zero=130))
    other = fp32_run(steps([1.0, 1.0], grad_total=1000, grad_zero=100))
    assert budgets.lost_gradients(own, other) == (60, 1800)
    assert budgets.judge_lost(0.04, own, other).kept is True
    assert budgets.judge_lost(0.03, own, other).kept is False  # 60 / 1800 = 3.33 %
    assert budgets.judge_lost(0.03, own, None).kept is None


def use(line: str, op: str, *takes: str, backward: bool = False) -> LineUse:
    return LineUse(line, op, takes, takes[0], backward)


TEXT = SourceText("train.py", ("y = head(x)", "z = other(x)", "w = x.exp()"))


def test_islands_are_fp32_matmuls_of_a_half_training() -> None:
    uses = [
        use("train.py:1", "addmm", "fp16"),
        use("train.py:2", "addmm", "fp32"),
        use("train.py:2", "mm", "fp32", backward=True),
        use("train.py:3", "exp", "fp32"),
    ]
    assert budgets.islands(run(steps(), *uses, TEXT)) == (
        Island("train.py:2", "z = other(x)", "addmm"),
    )
    assert budgets.islands(run(steps(), *uses[1:], TEXT)) == ()  # a training in fp32 has no islands


def test_an_island_that_moved_or_was_rewritten_is_not_new() -> None:
    base = [Island("train.py:2", "y = head(x)", "addmm")]
    moved = Island("train.py:9", "y = head(x)", "addmm")
    rewritten = Island("train.py:2", "y = self.head(x)", "addmm")
    added = Island("train.py:12", "z = tail(x)", "addmm")
    assert budgets.new_islands([moved], base) == ()
    assert budgets.new_islands([rewritten], base) == ()
    assert budgets.new_islands([moved, added], base) == (added,)
    assert budgets.new_islands(base, [moved, added]) == ()


def test_step_time_is_exceeded_when_every_round_exceeds_it() -> None:
    base = [[1.0, 1.0, 9.0], [1.0, 1.0, 1.0]]
    slow = budgets.judge_time(1.1, [[1.2, 1.2, 1.2], [1.3, 1.3, 1.3]], base)
    assert slow.kept is False
    assert slow.value == pytest.approx(1.25)
    assert budgets.judge_time(1.1, [[1.5, 1.5], [1.0, 1.0]], base).kept is True
    assert budgets.judge_time(1.1, [[], []], base).kept is None
