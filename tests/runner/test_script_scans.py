"""What is looked at outside the ops: a batch is what no weight has gone into."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from ampscope.capture.script.optimizer_steps import OptimizerSteps
from ampscope.runner.script_recorder import ScriptScans


def _scans(module: nn.Module, *inputs: torch.Tensor) -> list[str]:
    gradients: dict[int, str] = {}
    stands_in: Any = SimpleNamespace(
        optimizers=[], count=0, gradients=SimpleNamespace(names=gradients)
    )
    scans = ScriptScans(cast(OptimizerSteps, stands_in))
    scans.before_forward(module, module, inputs, {})
    return [s.name for s in scans.records if s.moment == "batch"]


def test_a_batch_is_looked_at_and_a_prediction_is_not() -> None:
    model, loss = nn.Linear(2, 1), nn.MSELoss()
    batch, target = torch.full((3, 2), math.nan), torch.zeros(3, 1)
    assert _scans(model, batch) == ["input 0 of Linear"]
    assert _scans(model, batch.requires_grad_()) == ["input 0 of Linear"]
    # A loss module is called from outside any other, with NaN that the model has made.
    assert _scans(loss, model(batch), target) == ["input 1 of MSELoss"]


def test_a_wrapper_is_in_no_name() -> None:
    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    stands_in: Any = SimpleNamespace(optimizers=[], count=0, gradients=SimpleNamespace(names={}))
    scans = ScriptScans(cast(OptimizerSteps, stands_in))
    scans.before_forward(model, model, (torch.ones(1, 2),), {})
    scans.at_end()
    names = [s.name for s in scans.records if s.kind != "batch"]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"] * 2
