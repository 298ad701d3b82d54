"""What is recorded of evaluations that are not finite: masks of -inf are told from NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.records import Cadence
from ampscope.runner.script_recorder import ScriptRecorder
from tests.helpers.script_watching import scaler, small_net, train


class Given(nn.Module):
    """Returns what it is given, filled at one place."""

    def forward(self, x: Tensor, value: float) -> Tensor:
        return x.masked_fill(torch.arange(x.numel()).view_as(x) == 0, value)


class Counting(TorchDispatchMode):
    """Counts the ops below autograd."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("values", "nan", "inf"),
    [
        ((0.0, 1.0), 0, 0),
        ((-float("inf"), 0.0, -float("inf")), 0, 2),
        ((-float("inf"), float("nan"), float("nan")), 2, 1),
    ],
)
def test_outputs_with_nan_and_with_infinities_are_counted_apart(
    values: tuple[float, ...], nan: int, inf: int, tmp_path: Path
) -> None:
    recorder = ScriptRecorder(str(tmp_path), Cadence(), lambda count: None)
    model, given = small_net(), Given()
    with recorder.watching():
        train(model, torch.optim.SGD(model.parameters(), 0.1), scaler(), steps=1)
        with torch.no_grad():
            for value in values:
                given(torch.ones(2, 3), value)
    outcome = recorder.outcome("returned")
    assert (outcome.eval_nan, outcome.eval_inf) == (nan, inf)
    assert outcome.eval_nonfinite is bool(nan + inf)


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_looks_at_an_evaluation_are_none_of_the_script_s_ops(value: float, tmp_path: Path) -> None:
    recorder = ScriptRecorder(str(tmp_path), Cadence(), lambda count: None)
    model, given = small_net(), Given()
    with recorder.watching():
        train(model, torch.optim.SGD(model.parameters(), 0.1), scaler(), steps=1)
        before = recorder.watch.seen_ops
        with torch.no_grad():
            given(torch.ones(2, 3), value)
    with torch.no_grad(), Counting() as own:
        given(torch.ones(2, 3), value)
    assert recorder.watch.seen_ops - before == own.count
