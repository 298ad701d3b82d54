"""Accelerate's loop, watched; the losses and learning rates of the loop itself are the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampscope.records import State
from tests.helpers.hostile_objects import TAKEN_BY_ACCELERATE, Wrapper, odd
from tests.helpers.script_runner import quick
from tests.helpers.trainers import assert_nothing_left, assert_same_bits, gradient_scales, recorded

accelerate = pytest.importorskip("accelerate")

from ampscope.integrations.accelerate import watch  # noqa: E402  # after the skip

STEPS = 8


def train(
    precision: str,
    store: Path | None,
    overflow_at: int = -1,
    alarms: list[Any] | None = None,
    name: str = "",
) -> tuple[Any, list[Any]]:
    """Returns the weights, and loss and lr of every step. For fp16 the accelerator is given the
    scaler that it makes by itself on GPUs only."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    if precision == "fp16":
        accelerator.scaler = torch.amp.GradScaler("cpu")
        accelerator.native_amp = True
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    if name:
        model[1] = odd(name)
    data = TensorDataset(torch.randn(STEPS * 4, 8), torch.randint(0, 4, (STEPS * 4,)))
    loader = DataLoader(data, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if name:
        optimizer = Wrapper(optimizer, "optimizer")
    more = {} if alarms is None else {"policy": "ignore", "on_alarm": alarms.append}
    run = watch(accelerator, model, optimizer, every=4, store=store, **more) if store else None
    seen = []
    for number, (inputs, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if number == overflow_at:
            loss = loss * float("inf")
        seen.append((loss.item(), optimizer.param_groups[0]["lr"]))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if run is not None:
        run.close()
    return accelerator.unwrap_model(model).state_dict(), seen


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_loop_is_recorded_as_it_ran(tmp_path: Path, precision: str) -> None:
    store = tmp_path / "runs.db"
    weights, seen = train(precision, store)
    plain, plain_seen = train(precision, None)
    assert_same_bits(weights, plain)
    assert_nothing_left()
    assert seen == plain_seen
    info, steps = recorded(store)
    assert info.state is State.FINISHED
    losses, rates = zip(*seen, strict=True)
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-6)
    assert [step.lr for step in steps] == pytest.approx(rates, rel=1e-6)
    assert {step.scale for step in steps} == {65536.0 if precision == "fp16" else None}
    assert set(gradient_scales(store)) == {65536.0 if precision == "fp16" else 1.0}


@pytest.mark.parametrize("name", quick(TAKEN_BY_ACCELERATE, "== makes a module"))
def test_objects_that_answer_as_they_like_are_not_asked(tmp_path: Path, name: str) -> None:
    weights, seen = train("bf16", tmp_path / "runs.db", name=name)
    plain, plain_seen = train("bf16", None, name=name)
    assert_same_bits(weights, plain)
    assert seen == plain_seen
    info, steps = recorded(tmp_path / "runs.db")
    assert (info.state, info.message, len(steps)) == (State.FINISHED, "", STEPS)


def test_a_skipped_step_is_seen_through_the_wrapper(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    weights, _ = train("fp16", store, overflow_at=3)
    plain, _ = train("fp16", None, overflow_at=3)
    assert_same_bits(weights, plain)
    _, steps = recorded(store)
    assert [step.step for step in steps if step.skipped] == [3]
    assert [step.scale for step in steps] == [65536.0] * 4 + [32768.0] * 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_planted_infinity_rings_at_its_step(tmp_path: Path, precision: str) -> None:
    alarms: list[Any] = []
    train(precision, tmp_path / "runs.db", overflow_at=3, alarms=alarms)
    found = [(alarm.step, alarm.name) for alarm in alarms]
    assert found[0] == (3, "nonfinite_loss")
    assert ((3, "nonfinite_weight") in found) is (precision == "bf16")
