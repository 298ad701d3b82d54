"""What is recorded of evaluations that are not finite: masks of -inf are told from NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.script import op_watch
from ampscope.observations import BadOp
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


class Squares(nn.Module):
    """Its square overflows fp16 from 256 on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            h = self.scale(x)
        return h.half() * h.half()


def _squares() -> Squares:
    model = Squares()
    nn.init.eye_(model.scale.weight)
    return model


@contextmanager
def _recorded(folder: Path, *, all_in_full: bool = False) -> Iterator[ScriptRecorder]:
    recorder = ScriptRecorder(str(folder), Cadence(), lambda count: None)
    with pytest.MonkeyPatch.context() as patch:
        if all_in_full:
            patch.setattr(op_watch, "IN_FULL", 10**6)
        with recorder.watching():
            yield recorder


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bad_at", [3, 29])
def test_an_overflow_in_a_late_evaluation_is_the_same_bad_op_as_in_an_early_one(
    bad_at: int, mode: Any, tmp_path: Path
) -> None:
    """All that is known of it: op, module, inputs and the ops before them."""

    def bad_ops(*, all_in_full: bool) -> list[BadOp]:
        model, net = _squares(), small_net()
        with _recorded(tmp_path, all_in_full=all_in_full) as recorder:
            train(net, torch.optim.SGD(net.parameters(), 0.1), scaler(), steps=1)
            with mode():
                for call in range(30):
                    model(torch.full((2, 4), 300.0 if call == bad_at else 1.0))
        assert recorder.outcome("returned").eval_inf == 1
        assert recorder.eval_taint >= 0
        return recorder.watch.records()

    (found,) = bad_ops(all_in_full=False)
    (expected,) = bad_ops(all_in_full=True)
    assert (found.op, found.module_type, found.pos_inf) == ("aten.mul", "Squares", 8)
    assert found == expected


def test_evaluations_in_a_row_are_recorded_in_full_a_few_times(tmp_path: Path) -> None:
    model, x = _squares(), torch.ones(2, 4)
    with torch.no_grad(), Counting() as own:
        model(x)
    with _recorded(tmp_path) as recorder, torch.no_grad():
        for _ in range(40):
            model(x)
    assert recorder.watch.seen_ops == own.count * op_watch.IN_FULL


def test_what_runs_without_gradients_within_a_step_is_recorded_in_full(tmp_path: Path) -> None:
    """A teacher before the student, a metric behind it, and an evaluation now and then."""

    def seen(*, all_in_full: bool) -> int:
        teacher, student = _squares(), small_net()
        optimizer = torch.optim.SGD(student.parameters(), 0.1)
        with _recorded(tmp_path, all_in_full=all_in_full) as recorder:
            for step in range(12):
                with torch.no_grad():
                    for _ in range(3):
                        teacher(torch.ones(2, 4))
                train(student, optimizer, scaler(), steps=1)
                with torch.no_grad():
                    for _ in range(4 + step % 2):
                        teacher(torch.ones(2, 4))
        return recorder.watch.seen_ops

    assert seen(all_in_full=False) == seen(all_in_full=True)


def test_a_total_that_stops_growing_is_seen_however_many_evaluations_it_adds(
    tmp_path: Path,
) -> None:
    """fp16 counts to 2,048."""

    def records(*, all_in_full: bool) -> list[BadOp]:
        model, total = _squares(), torch.full((4,), 2040.0, dtype=torch.float16)
        with _recorded(tmp_path, all_in_full=all_in_full) as recorder, torch.no_grad():
            for _ in range(30):
                total = total + model(torch.ones(2, 4)).sum(0) / 2
        assert total.tolist() == [2048.0] * 4
        return recorder.watch.records()

    assert {b.kind for b in records(all_in_full=False)} & {"stall", "drift"}
    assert records(all_in_full=False) == records(all_in_full=True)
