"""Interventions on every optimizer's step: the learning rate, fp32 masters and state.

The oracle is the same training written out by hand with the change in its own lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ampscope.runner.controls import applied
from tests.helpers.script_watching import batch, equal, scaler, small_net, train, weights_of


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_another_learning_rate_and_the_schedule_sees_its_own() -> None:
    trained, rates = [], []
    for control, lr in (("lr:0.25", 0.4), ("as_is", 0.1)):
        with applied(control):
            model = small_net()
            optimizer = torch.optim.SGD(model.parameters(), lr)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(3):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
                mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
                optimizer.step()
                schedule.step()
            trained.append(weights_of(model))
    assert equal(*trained)
    assert rates == [0.4, 0.2, 0.1, 0.1, 0.05, 0.025]


def test_a_learning_rate_comes_back_after_a_step_that_raised() -> None:
    class Raising(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise OSError("disk")

    with applied("lr:0.25"):
        optimizer = Raising(small_net().parameters(), 0.4)
        for _ in range(3):
            with pytest.raises(OSError, match="disk"):
                optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 0.1  # while it was taken


def _half_steps(
    around: AbstractContextManager[object], steps: int = 8
) -> tuple[Tensor, Tensor | None]:
    """A half weight of 1 that gets a gradient of 2^-12 a step, learning rate 1."""
    with around:
        weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = torch.optim.SGD([weight], 1.0, momentum=0.0)
        for _ in range(steps):
            weight.grad = torch.full((4,), 2.0**-12, dtype=torch.float16)
            optimizer.step()
        assert weight.dtype == torch.float16
        return weight.detach().float(), weight.grad


def test_fp32_masters_collect_updates_that_half_loses() -> None:
    """The spacing below 1 in fp16 is 2^-11: a step of 2^-12 is a tie that rounds back to 1."""
    stuck, _ = _half_steps(_nothing())
    moved, gradient = _half_steps(applied("fp32_state"))
    assert torch.equal(stuck, torch.ones(4))
    assert torch.equal(moved, torch.full((4,), 1 - 8 * 2.0**-12))
    assert gradient is not None
    assert torch.equal(gradient, torch.full((4,), 2.0**-12, dtype=torch.float16))


def test_fp32_state_is_fp32_and_follows_what_the_script_writes() -> None:
    with applied("fp32_state"):
        weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = torch.optim.Adam([weight], 1e-3)
        for step in range(3):
            if step == 2:
                with torch.no_grad():
                    weight.fill_(5.0)  # the script clamps, averages or loads
            weight.grad = torch.full((4,), 0.5, dtype=torch.float16)
            optimizer.step()
        assert {v.dtype for v in optimizer.state[weight].values() if v.dim()} == {torch.float32}
        assert torch.allclose(weight.float(), torch.full((4,), 5.0), atol=5e-3)


def test_fp32_state_leaves_fp32_weights_alone() -> None:
    trained = []
    for control in ("as_is", "fp32_state"):
        with applied(control):
            model = small_net()
            train(model, torch.optim.Adam(model.parameters(), 0.01), scaler())
            trained.append(weights_of(model))
    assert equal(*trained)
