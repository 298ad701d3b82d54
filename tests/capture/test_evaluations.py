"""What is recorded of evaluations that are not finite: masks of -inf are told from NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ampscope.records import Cadence
from ampscope.runner.script_recorder import ScriptRecorder
from tests.helpers.script_watching import scaler, small_net, train


class Given(nn.Module):
    """Returns what it is given, filled at one place."""

    def forward(self, x: Tensor, value: float) -> Tensor:
        return x.masked_fill(torch.arange(x.numel()).view_as(x) == 0, value)


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
