"""What is looked at outside the ops: a batch is what no weight has gone into."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from ampscope.capture.script.optimizer_steps import OptimizerSteps
from ampscope.capture.script.script_scans import ScriptScans


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


def _ends_of(
    then: Callable[[nn.Module], None], held: list[nn.Module] | None = None
) -> list[tuple[str, str, bool]]:
    """(kind, name, whether it moved) of the end, where the script's function returns after
    ``then``, and nothing but ``held`` holds its model."""
    stands_in: Any = SimpleNamespace(optimizers=[], count=0, gradients=SimpleNamespace(names={}))
    scans = ScriptScans(cast(OptimizerSteps, stands_in))

    def script() -> None:
        model = _made()
        if held is not None:
            held.append(model)
        stands_in.optimizers.append(torch.optim.SGD(model.parameters(), 0.1))
        scans.before_forward(model, model, (torch.ones(4, 2),), {})
        then(model)

    script()
    scans.at_end()
    return [(s.kind, s.name, bool(s.change)) for s in scans.records if s.moment == "end"]


def _trained(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5


def _made() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))


def test_a_model_that_is_gone_with_its_function_is_seen_as_it_was_last() -> None:
    alive: list[nn.Module] = []
    kept = _ends_of(_trained, alive)
    assert kept == [
        ("parameter", "0.weight", True),
        ("buffer", "1.running_mean", False),
        ("buffer", "1.running_var", False),
    ]
    assert _ends_of(_trained) == kept


def test_a_copy_that_was_only_evaluated_is_not_looked_at_when_it_is_gone() -> None:
    assert _ends_of(lambda model: None) == []


def test_of_models_with_the_same_names_one_that_lives_or_the_last_one_tells() -> None:
    stands_in: Any = SimpleNamespace(optimizers=[], count=0, gradients=SimpleNamespace(names={}))
    scans = ScriptScans(cast(OptimizerSteps, stands_in))
    for fold in (1, 2, 3):
        model = _made()
        scans.before_forward(model, model, (torch.ones(4, 2),), {})
        with torch.no_grad():
            model.get_parameter("0.weight").fill_(fold)
    del model
    scans.at_end()
    (weight,) = [s for s in scans.records if s.moment == "end" and s.kind == "frozen"]
    assert weight.max_abs == 3.0
    alive = _made()
    scans.before_forward(alive, alive, (torch.ones(4, 2),), {})
    count = len(scans.records)
    scans.at_end()
    assert [s.name for s in scans.records[count:] if s.kind == "frozen"] == ["0.weight"]


def test_an_average_that_is_gone_is_seen_beside_the_model_that_lives() -> None:
    stands_in: Any = SimpleNamespace(optimizers=[], count=0, gradients=SimpleNamespace(names={}))
    scans = ScriptScans(cast(OptimizerSteps, stands_in))
    model, average = _made(), _made().bfloat16()
    stands_in.optimizers.append(torch.optim.SGD(model.parameters(), 0.1))
    for each, dtype in ((model, torch.float32), (average, torch.bfloat16)):
        scans.before_forward(each, each, (torch.ones(4, 2, dtype=dtype),), {})
        _trained(each)
    del average, each
    scans.at_end()
    ends = [(s.kind, s.dtype) for s in scans.records if s.moment == "end" and s.kind != "buffer"]
    assert ends == [("parameter", "fp32"), ("frozen", "bf16")]


def test_of_many_models_alike_the_last_is_named_and_seen_at_the_end() -> None:
    """One for each of thirteen folds: the first ten are looked at as they start. Each forward of
    the others is no new model."""
    names: dict[int, str] = {}
    stands_in: Any = SimpleNamespace(optimizers=[], count=0, gradients=SimpleNamespace(names=names))
    scans = ScriptScans(cast(OptimizerSteps, stands_in))
    folds = [_made() for _ in range(13)]
    for _ in range(3):
        for model in folds:
            scans.before_forward(model, model, (torch.ones(4, 2),), {})
    scans.at_end()
    weights = [s.moment for s in scans.records if s.name == "0.weight"]
    assert (weights.count("start"), weights.count("end")) == (10, 13)
    assert [names[id(p)] for p in folds[-1].parameters()] == ["0.weight"]
