"""Alarms of a watched training: when they begin, and what the policies do with them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from watched import recorded, small_net, train_fp16, watching

import ampscope
from ampscope.exponents import FIRST, LOWEST, RAW_LEN
from ampscope.records import Event, Frame, Role, State, StepRecord
from ampscope.watcher.alarms import Alarm, AlarmBounds, Alarms, AmpscopeWarning, lost_share
from ampscope.watcher.schedule import LONGEST_WAIT, TIGHT_STEPS, Schedule


def step(number: int, **facts: object) -> StepRecord:
    usual = {"loss": 1.0, "scale": 1024.0, "lr": 0.1, "grad_norm": 1.0}
    return StepRecord(number, **{**usual, **facts})


def gradients(counts: dict[int, int], scale: float = 1024.0) -> Frame:
    """``counts`` by exponent."""
    row = np.zeros((1, RAW_LEN), np.int64)
    for exponent, count in counts.items():
        row[0, exponent - LOWEST + FIRST] = count
    return Frame(0, Role.WEIGHT_GRAD, (0,), ("fp32",), row, scale)


def names(alarms: Alarms, steps: list[StepRecord]) -> list[tuple[int, str]]:
    return [(e.step, e.name) for s in steps for e in alarms.check(s)]


def test_a_scale_below_one_rings_once_until_it_recovers() -> None:
    scales = [2.0, 1.0, 0.5, 0.25, 2.0, 0.5]
    rung = names(Alarms(AlarmBounds()), [step(i, scale=s) for i, s in enumerate(scales)])
    assert rung == [(2, "scale_collapse"), (5, "scale_collapse")]


def test_skips_in_a_row_ring_at_the_bound() -> None:
    skipped = [True] * 9 + [False] + [True] * 10 + [False]
    rung = names(Alarms(AlarmBounds()), [step(i, skipped=s) for i, s in enumerate(skipped)])
    assert rung == [(19, "skips_in_a_row")]


def test_a_search_from_a_high_scale_rings_when_it_has_gone_too_far() -> None:
    """From 2^24 down: nobody is told before the scale has come to 64, 18 halvings below."""
    steps = [step(i, skipped=True, scale=2.0 ** (24 - i)) for i in range(20)]
    assert names(Alarms(AlarmBounds()), steps) == [(18, "skips_in_a_row")]


def test_weights_that_stand_still_ring_after_three_measured_steps() -> None:
    moved = [1.0, 0.0, None, 0.0, None, 0.0005, 0.0]
    rung = names(Alarms(AlarmBounds()), [step(i, moved_share=m) for i, m in enumerate(moved)])
    assert rung == [(5, "weights_not_moving")]


@pytest.mark.parametrize("facts", [{"lr": 0.0}, {"skipped": True}, {"grad_norm": 0.0}])
def test_weights_may_stand_still_without_a_learning_rate_or_when_skipped(
    facts: dict[str, object],
) -> None:
    steps = [step(i, moved_share=0.0, **facts) for i in range(8)]
    assert names(Alarms(AlarmBounds(skips_in_a_row=0)), steps) == []


def test_lost_share_counts_what_fp16_rounds_to_zero() -> None:
    """fp16's smallest number is 2^-24, and what is above half of it rounds up to it."""
    frame = gradients({-30: 30, -26: 10, -25: 40, 0: 20})
    assert lost_share(frame) == pytest.approx(0.4)
    assert lost_share(gradients({})) is None
    (event,) = Alarms(AlarmBounds()).check(step(0), frame)
    assert event.name == "lost_share"
    assert "40%" in event.text
    assert Alarms(AlarmBounds(lost_share=0.5)).check(step(0), frame) == []
    assert Alarms(AlarmBounds()).check(step(0, scale=None), frame) == []  # no scaler: not fp16


def test_bounds_of_zero_switch_alarms_off() -> None:
    off = AlarmBounds(0.0, 0, 0.0, 0.0, 0)
    steps = [step(i, scale=1e-9, skipped=True, moved_share=0.0) for i in range(30)]
    assert names(Alarms(off), steps) == []


def test_a_healthy_calibration_rings_nothing(tmp_path: Path) -> None:
    watched, ids = watching(tmp_path / "runs.db", every=1)
    train_fp16(40, watched, init_scale=2.0**17)  # warnings are errors here
    run = recorded(tmp_path / "runs.db", ids[0])
    assert run.of("alarm") == []
    assert run.of("capsule") == []
    assert run.of("nonfinite") == []
    assert [e.step for e in run.of("calibration")] == [0], "once a streak"


def test_the_policy_warn_warns_and_the_callback_is_called(tmp_path: Path) -> None:
    heard: list[Event] = []
    bounds = AlarmBounds(skips_in_a_row=3)
    watched, ids = watching(tmp_path / "runs.db", on_alarm=heard.append, alarms=bounds)
    with pytest.warns(AmpscopeWarning, match="3 steps in a row"):
        train_fp16(12, watched, bad_at=tuple(range(4, 9)))
    assert [(e.step, e.name) for e in heard] == [(6, "skips_in_a_row")]
    assert recorded(tmp_path / "runs.db", ids[0]).of("alarm") == heard


def test_the_policy_raise_raises_after_the_step_is_recorded(tmp_path: Path) -> None:
    bounds = AlarmBounds(skips_in_a_row=3)
    watched, ids = watching(tmp_path / "runs.db", policy="raise", alarms=bounds)
    with pytest.raises(Alarm, match="in a row"):
        train_fp16(12, watched, bad_at=tuple(range(4, 9)))
    run = recorded(tmp_path / "runs.db", ids[0])
    assert [s.step for s in run.steps] == list(range(7))
    assert run.info.state is State.FAILED


def test_the_policy_stop_leaves_the_block_quietly(tmp_path: Path) -> None:
    bounds = AlarmBounds(skips_in_a_row=3)
    watched, ids = watching(tmp_path / "runs.db", policy="stop", alarms=bounds)
    with pytest.warns(AmpscopeWarning):
        train_fp16(12, watched, bad_at=tuple(range(4, 9)))
    run = recorded(tmp_path / "runs.db", ids[0])
    assert len(run.steps) == 7
    assert run.info.state is State.FINISHED
    assert "Stopped by an alarm" in run.info.message


def test_without_a_block_the_policy_stop_sets_a_flag(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)  # no weight can move by so little
    run = ampscope.watch(model, store=tmp_path / "runs.db", every=1, policy="stop")
    steps = 0
    warned = []
    while not run.should_stop:
        model(torch.ones(1, 2)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        warned += caught
        steps += 1
    run.close()
    assert [w.category for w in warned] == [AmpscopeWarning]
    assert steps == AlarmBounds().still_steps
    assert [e.name for e in run.alarms] == ["weights_not_moving"]


def test_a_person_may_stop_a_watched_run(tmp_path: Path) -> None:
    from ampscope.store.writer import request_cancel

    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, store=tmp_path / "runs.db") as run:
        request_cancel(run.store, run.id)
        for _ in range(1_000_000):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        pytest.fail("the training was not stopped")
    info = recorded(run.store, run.id).info
    assert (info.state, info.message) == (State.CANCELLED, "A person asked the run to stop.")


def test_a_run_that_stays_bad_is_tightened_ever_more_rarely() -> None:
    schedule = Schedule(every=0)
    tight = [
        s for s in range(400_000) if schedule.saw(s, bad=s % 2 == 0)
    ]  # every other step is an onset
    gaps = np.diff(tight)
    assert (gaps[1:] >= gaps[:-1]).all()
    assert len(tight) < 20
    assert gaps[-1] >= LONGEST_WAIT
    recorded_steps = sum(schedule.detail(s, s).histograms for s in range(1000))
    assert recorded_steps == 0 or tight[-1] + TIGHT_STEPS >= 1000


def test_of_a_long_bad_streak_ever_fewer_steps_have_histograms() -> None:
    schedule, recorded_at = Schedule(every=1), []
    for number in range(5000):
        if schedule.detail(number, number).histograms:
            recorded_at.append(number)
        schedule.saw(number, bad=True)
    assert recorded_at[:64] == list(range(64))
    assert recorded_at[64:] == [64, 128, 256, 512, 1024, 2048, 4096]
    schedule.saw(5000, bad=False)
    assert schedule.detail(5001, 5001).histograms
