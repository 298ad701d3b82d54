"""Histograms of a watched training on a CUDA device, a fake one: the host never waits for them."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture import exponent_count
from ampscope.records import Event, Role
from ampscope.watcher import session
from tests.helpers.counted_device import CountedDevice
from tests.helpers.watched import Recorded, recorded

STEPS = 8


def trained(
    store: Path, patch: pytest.MonkeyPatch, *, fake: bool, scaled: bool = False, bad: int = -1,
    every: int = 1, ends_at: int = STEPS, closes: bool = True, alarms: list[Event] | None = None,
) -> tuple[Recorded, list[Counter[str]]]:  # fmt: skip
    """A training on the fake device or on the CPU, whose step ``bad`` has an infinite loss: what
    was recorded, and what the host waited for at each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    batches = [torch.randn(4, 8) for _ in range(STEPS)]
    given = [one for one in (model, optimizer, scaler) if one is not None]
    run = ampscope.watch(*given, store=store, every=every, policy="ignore",
                         on_alarm=None if alarms is None else alarms.append)  # fmt: skip
    waits = []
    counted = CountedDevice()
    with run if closes else nullcontext(), counted if fake else nullcontext(counted) as device:
        if fake:
            patch.setattr(torch.cuda, "current_stream", lambda *args: STREAM)
            patch.setattr(Tensor, "record_stream", lambda *args: None)
            patch.setattr(exponent_count, "triton_problem", lambda device: "none here")
            patch.setattr(exponent_count, "current_handle", lambda index: STREAM.cuda_stream)
        for device.step, batch in enumerate(batches[:ends_at]):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            if device.step == bad:
                loss = loss * torch.tensor(float("inf"))
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            waits.append(device.take()[1])
        patch.undo()
    if not closes:
        run._session.recorder._left()  # as Python does when the process ends
    return recorded(store, run.id), waits


STREAM = MagicMock()  # the one there is


@pytest.mark.parametrize("bad", [-1, 5, STEPS - 1])
@pytest.mark.parametrize("scaled", [False, True])
def test_no_step_and_no_number_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaled: bool, bad: int
) -> None:
    """Counts that arrive a step later are those that a CPU has at once: at every step, the last and
    a bad one among them."""
    (device, _), (cpu, _) = (
        trained(tmp_path / "runs.db", monkeypatch, fake=fake, scaled=scaled, bad=bad)
        for fake in (True, False)
    )
    assert [step.step for step in device.steps] == list(range(STEPS))
    for role in Role:
        assert device.at(role) == cpu.at(role)
        for one, other in zip(device.frames[role], cpu.frames[role], strict=True):
            assert (one.modules, one.dtypes, one.scale) == (
                other.modules,
                other.dtypes,
                other.scale,
            )
            np.testing.assert_array_equal(one.rows, other.rows)
    assert device.at(Role.ACTIVATION) == list(range(STEPS))
    assert device.nonfinite == cpu.nonfinite
    assert bool(device.nonfinite) == (bad >= 0)


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "left open"])
def test_the_last_step_is_recorded_and_its_alarms_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """A script that ends at its first bad step without a word loses neither of them."""
    ends = []
    for fake in (True, False):
        alarms: list[Event] = []
        found, _ = trained(tmp_path / "runs.db", monkeypatch, fake=fake, bad=STEPS - 1,
                           closes=closes, alarms=alarms)  # fmt: skip
        ends.append(([step.step for step in found.steps], {(a.step, a.name) for a in alarms}))
    assert ends[0] == ends[1]
    assert len(ends[0][0]) == STEPS
    assert (STEPS - 1, "nonfinite_loss") in ends[0][1]


@pytest.mark.parametrize("every", [0, 1, 3])
def test_recorded_steps_wait_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    _, waits = trained(tmp_path / "runs.db", monkeypatch, fake=True, every=every)
    assert waits == [Counter()] * STEPS


def test_with_a_scaler_recorded_steps_wait_no_more_often_than_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, counting = (
        trained(tmp_path / "runs.db", monkeypatch, fake=True, scaled=True, every=every)[1]
        for every in (0, 1)
    )
    assert counting == quiet


def test_the_counter_is_compiled_when_the_watch_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, whose time it would be otherwise; a note says what there is to say."""
    prepared: list[torch.device] = []

    def prepare(device: torch.device) -> str:
        prepared.append(device)
        return "It took 9 s."

    monkeypatch.setattr(session, "prepare", prepare)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    run = ampscope.watch(model, store=tmp_path / "runs.db")
    assert prepared == [torch.device("cpu"), torch.device("meta")]
    run.close()
    notes = [e for e in recorded(tmp_path / "runs.db", run.id).events if "9 s" in e.text]
    assert [(note.step, note.kind, note.name) for note in notes] == [
        (0, "note", "exponent counter")
    ] * 2


def test_a_training_that_ends_early_has_all_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was on its way when the watch ends is read then."""
    device, _ = trained(tmp_path / "runs.db", monkeypatch, fake=True, scaled=True, ends_at=3)
    assert [step.step for step in device.steps] == device.at(Role.UPDATE) == [0, 1, 2]
