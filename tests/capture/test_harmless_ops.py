"""Infinities that end harmless, were meant, or came with the data are no op's fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampscope.observations import BadOp
from tests.helpers.script_watching import watched


def _bad(run: Callable[[], Tensor | None]) -> tuple[list[BadOp], int | None]:
    """Non-finite ops, and the one that the result descends from."""
    with watched() as seen:
        result = run()
        taint = seen.watch.taint_of(result)
        return [b for b in seen.watch.records() if b.kind == "nonfinite"], taint


def _masked_softmax() -> Tensor:
    scores = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float16)
    mask = torch.tensor([[False, False, True]])
    return torch.softmax(scores.masked_fill(mask, float("-inf")), -1).sum()


def _added_mask() -> Tensor:
    mask = torch.full((1, 3), float("-inf")).triu(1)
    return torch.softmax(torch.ones(1, 3) + mask, -1).sum()


def _saturated_tanh() -> Tensor:
    return torch.tanh(torch.exp(torch.tensor([20.0], dtype=torch.float16))).sum()


def _reciprocal_of_an_overflow() -> Tensor:
    return (1 / torch.exp(torch.tensor([20.0], dtype=torch.float16))).sum()


@pytest.mark.parametrize(
    ("script", "roots"),
    [(_masked_softmax, 0), (_added_mask, 0), (_saturated_tanh, 1), (_reciprocal_of_an_overflow, 1)],
)
def test_an_infinity_that_ends_harmless_is_not_the_root_of_the_result(
    script: Callable[[], Tensor], roots: int
) -> None:
    bad, taint = _bad(script)
    assert taint is None
    assert len(bad) == roots  # an exp that overflowed stays a fact; it is the root of nothing


def test_a_row_that_is_all_masked_is_a_root_of_its_own() -> None:
    bad, taint = _bad(lambda: torch.softmax(torch.full((2, 3), float("-inf")), -1).sum())
    assert [(b.op, b.nan) for b in bad] == [("aten._softmax", 6)]
    assert taint == bad[0].id


def test_nan_in_the_data_is_no_ops_fault() -> None:
    x = torch.tensor([1.0, float("nan")])
    with watched() as seen:
        result = (x * 2 + 1).sum()
        assert seen.watch.taint_of(result) == -1
    assert seen.watch.records() == []
    assert "nan_operand" in [u.name for u in seen.watch.uses.records()]


def test_nan_out_of_infinities_keeps_the_old_root() -> None:
    def script() -> Tensor:
        large = torch.exp(torch.tensor([20.0], dtype=torch.float16))
        return (large - large).sum()

    bad, taint = _bad(script)
    assert [b.op for b in bad] == ["aten.exp"]
    assert taint == bad[0].id
