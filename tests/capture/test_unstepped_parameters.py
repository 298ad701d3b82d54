"""Parameters that get gradients and that no optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from ampscope.capture.script.script_scans import ScriptScans
from ampscope.observations import UNSTEPPED
from tests.helpers.script_watching import batch, small_net, watched

STEPS = 3
AfterStep = Callable[[nn.Module], object]


def unstepped(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    after: AfterStep = lambda model: None,
) -> list[str]:
    """Names, after a training that steps the optimizers and then calls ``after``."""
    with watched() as seen:
        scans = ScriptScans(seen.steps)
        for step in range(STEPS):
            x, y = batch(step)
            scans.before_forward(model, model, (x,), {})
            mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                scans.after_step()
                optimizer.zero_grad()
            after(model)
        found = scans.unstepped()
    assert {use.name for use in found} <= {UNSTEPPED}
    return [use.module for use in found]


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], 0.01)


def test_a_head_that_was_replaced_after_the_optimizer_was_made_is_named() -> None:
    model = small_net()
    optimizer = sgd(model)
    model[2] = nn.Linear(8, 1)
    assert unstepped(model, optimizer) == ["2.weight", "2.bias"]


def test_one_whose_optimizer_never_steps_is_named() -> None:
    model = small_net()
    idle = sgd(model[2])
    named = unstepped(model, sgd(model[0]), after=lambda _: idle.zero_grad())
    assert named == ["2.weight", "2.bias"]


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None


def test_parameters_that_the_script_steps_itself_are_not_named() -> None:
    model = small_net()
    assert unstepped(model, sgd(model[0]), after=by_hand) == []


@pytest.mark.parametrize("frozen", [True, False])
def test_what_gets_no_gradients_and_what_is_stepped_is_not_named(frozen: bool) -> None:
    model = small_net()
    model[0].requires_grad_(not frozen)
    parts = [model[2]] if frozen else [model[0], model[2]]
    assert unstepped(model, *map(sgd, parts)) == []
