"""Alarms of a watched training: when they begin, and what the policies do with them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ampscope
from ampscope.numerics.histogram import FIRST, LOWEST, RAW_LEN
from ampscope.records import Event, Frame, Role, State, StepRecord
from ampscope.watcher.alarm_dispatcher import AlarmDispatcher, WatchSettings
from ampscope.watcher.alarms import (
    Alarm,
    AlarmBounds,
    Alarms,
    AmpscopeWarning,
    Signs,
    SpikeDetector,
    StopAsked,
    lost_share,
)
from ampscope.watcher.capsule import CapsuleLimits
from ampscope.watcher.schedule import LONGEST_WAIT, TIGHT_STEPS, Schedule
from tests.helpers.watched import recorded, small_net, train_fp16, watching


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
    bounds = AlarmBounds(skips_in_a_row=3, nonfinite=False)
    watched, ids = watching(tmp_path / "runs.db", on_alarm=heard.append, alarms=bounds)
    with pytest.warns(AmpscopeWarning, match="3 steps in a row"):
        train_fp16(12, watched, bad_at=tuple(range(4, 9)))
    assert [(e.step, e.name) for e in heard] == [(6, "skips_in_a_row")]
    assert recorded(tmp_path / "runs.db", ids[0]).of("alarm") == heard


def test_the_policy_raise_raises_after_the_step_is_recorded(tmp_path: Path) -> None:
    bounds = AlarmBounds(skips_in_a_row=3, nonfinite=False)
    watched, ids = watching(tmp_path / "runs.db", policy="raise", alarms=bounds)
    with pytest.raises(Alarm, match="in a row"):
        train_fp16(12, watched, bad_at=tuple(range(4, 9)))
    run = recorded(tmp_path / "runs.db", ids[0])
    assert [s.step for s in run.steps] == list(range(7))
    assert run.info.state is State.FAILED


def test_the_policy_stop_leaves_the_block_quietly(tmp_path: Path) -> None:
    bounds = AlarmBounds(skips_in_a_row=3, nonfinite=False)
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


def test_a_stop_that_a_person_asked_for_is_theirs_at_a_step_with_an_alarm() -> None:
    settings = WatchSettings(
        None, "warn", "", AlarmBounds(), CapsuleLimits(), replay=False, on_alarm=None
    )
    dispatcher = AlarmDispatcher(settings, lambda: True, lambda alarms: None)
    dispatcher.in_block = True
    with pytest.warns(AmpscopeWarning), pytest.raises(StopAsked):
        dispatcher.dispatch([Event(3, "alarm", "loss_not_finite", "The loss is NaN.")])


def test_a_run_that_stays_bad_is_tightened_ever_more_rarely() -> None:
    schedule = Schedule(every=0)
    tight = [
        s for s in range(400_000) if schedule.saw(s, bad=s % 2 == 0)
    ]  # every other step is an onset
    gaps = np.diff(tight)
    assert (gaps[1:] >= gaps[:-1]).all()
    assert len(tight) < 20
    assert gaps[-1] >= LONGEST_WAIT
    recorded_steps = sum(schedule.detail(s, s)[0] for s in range(1000))
    assert recorded_steps == 0 or tight[-1] + TIGHT_STEPS >= 1000


def test_of_a_long_bad_streak_ever_fewer_steps_have_histograms() -> None:
    schedule, recorded_at = Schedule(every=1), []
    for number in range(5000):
        if schedule.detail(number, number)[0]:
            recorded_at.append(number)
        schedule.saw(number, bad=True)
    assert recorded_at[:64] == list(range(64))
    assert recorded_at[64:] == [64, 128, 256, 512, 1024, 2048, 4096]
    schedule.saw(5000, bad=False)
    assert schedule.detail(5001, 5001)[0]


@pytest.mark.parametrize("price_s", [0.001, 0.02, 0.5])
def test_without_an_interval_histograms_take_a_bounded_share_of_the_time(price_s: float) -> None:
    step_s, steps = 0.02, 50_000
    schedule, recorded_at, with_weights = Schedule(every=None), [], []
    for number in range(steps):
        histograms, weights = schedule.detail(number, number)
        if histograms:
            recorded_at.append(number)
        if weights:
            with_weights.append(number)
        spent_s = price_s if histograms else 0.0
        schedule.took(spent_s, step_s + spent_s)
    spent_s = price_s * len(recorded_at)
    assert spent_s <= 2.0 + 0.01 * (steps * step_s + spent_s) + 2 * price_s  # the first is free
    free = min(int(2.0 / price_s), steps // 10)  # until then every tenth step
    assert recorded_at[:free] == list(range(0, 10 * free, 10))
    assert with_weights == recorded_at[::10]
    if price_s == 0.001:  # cheap ones are never left out
        assert len(recorded_at) == steps // 10


def test_what_the_first_histograms_compile_puts_off_no_later_ones() -> None:
    """A counter that takes 8 s to compile, and 1 ms from then on: every tenth step is recorded."""
    schedule, recorded_at = Schedule(every=None), []
    for number in range(1000):
        spent_s = 0.0
        if schedule.detail(number, number)[0]:
            spent_s = 0.001 if recorded_at else 8.0
            recorded_at.append(number)
        schedule.took(spent_s, 0.02 + spent_s)
    assert recorded_at == list(range(0, 1000, 10))


def bf16_training(
    store: Path, steps: int = 12, *, poison: str = "", at: int = 4, **options: object
) -> ampscope.Watch:
    """bf16 autocast without a scaler; ``poison`` spoils one thing at one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ampscope.watch(model, optimizer, store=store, **{"policy": "ignore", **options}) as run:
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(16, 8)).float().square().mean()
            if step == at and poison == "loss":
                loss = loss * float("nan")
            loss.backward()
            if step == at and poison == "gradient":
                model[2].weight.grad[0, 3] = float("inf")
            optimizer.step()
            if step == at and poison == "weight":
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
    return run


@pytest.mark.parametrize(
    ("poison", "expected"),
    [
        ("loss", [(4, "nonfinite_loss"), (4, "nonfinite_gradient"), (4, "nonfinite_weight")]),
        ("gradient", [(4, "nonfinite_gradient"), (4, "nonfinite_weight"), (5, "nonfinite_loss")]),
        ("weight", [(5, "nonfinite_loss"), (5, "nonfinite_gradient"), (5, "nonfinite_weight")]),
    ],
)
def test_without_a_scaler_what_is_not_finite_rings_at_the_first_step(
    tmp_path: Path, poison: str, expected: list[tuple[int, str]]
) -> None:
    run = bf16_training(tmp_path / "runs.db", poison=poison)
    assert [(e.step, e.name) for e in run.alarms] == expected
    (capsule,) = run.capsules[:1]
    for alarm in run.alarms:
        assert f"Rank 0, step {alarm.step}." in alarm.text
        assert f"ampscope replay {capsule} --model" in alarm.text
    first = run.alarms[0]
    assert "module 2" in first.text if poison != "weight" else "module " in first.text


def test_a_loss_that_is_nan_rings_with_a_scaler_too(tmp_path: Path) -> None:
    heard: list[Event] = []
    watched, _ = watching(tmp_path / "runs.db", on_alarm=heard.append, policy="ignore")
    train_fp16(8, watched, bad_at=(4,))
    assert [(e.step, e.name) for e in heard] == [(4, "nonfinite_loss")], "its step was left out"


@pytest.mark.parametrize("policy", ["stop", {"nonfinite_loss": "stop", "default": "ignore"}])
def test_the_policy_stop_ends_a_bf16_training_at_the_step(tmp_path: Path, policy: object) -> None:
    with pytest.warns(AmpscopeWarning, match="Step 4: "):
        run = bf16_training(tmp_path / "runs.db", poison="loss", policy=policy)
    assert run.should_stop
    assert len(recorded(run.store, run.id).steps) == 5


def test_the_policy_may_differ_by_alarm(tmp_path: Path) -> None:
    policy = {"nonfinite_gradient": "raise", "default": "ignore"}
    with pytest.raises(Alarm, match=r"not finite: 2\.(weight|bias)"):
        bf16_training(tmp_path / "runs.db", poison="loss", policy=policy)


def test_a_warning_that_is_an_error_ends_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = bf16_training(tmp_path / "runs.db", poison="loss", policy="warn")
    assert len(recorded(run.store, run.id).steps) == 12
    assert "ampscope: Step 4: The loss is NaN" in capsys.readouterr().err


def test_gradients_of_zero_ring_after_ten_steps_where_the_loss_is_not_zero() -> None:
    def rung(**facts: object) -> list[tuple[int, str]]:
        steps = [step(i, grad_norm=0.0, **facts) for i in range(30)]
        return names(Alarms(AlarmBounds()), steps)

    assert rung() == [(9, "zero_gradients")]
    assert rung(loss=0.0) == [], "every sample is on the right side of its margin"
    none = Alarms(AlarmBounds())
    events = [
        none.check(step(i, grad_norm=0.0), signs=Signs(has_gradients=False)) for i in range(30)
    ]
    assert not any(events), "an optimizer that got no gradient at all"


@pytest.mark.parametrize("high", [1.1e6, 19.0, 50_000.0])
def test_a_loss_that_jumps_and_stays_rings_at_its_second_step(high: float) -> None:
    numbers = np.random.default_rng(0)
    losses = [1.4 - 0.001 * i + 0.05 * numbers.standard_normal() for i in range(200)]
    alarms = Alarms(AlarmBounds())
    rung = names(alarms, [step(i, loss=x) for i, x in enumerate([*losses, *[high] * 30])])
    assert rung == [(201, "loss_spike")]


def test_one_outlier_is_no_spike() -> None:
    losses = [1.0 + 0.01 * (i % 7) for i in range(300)]
    losses[100] = losses[200] = 1e6
    assert names(Alarms(AlarmBounds()), [step(i, loss=x) for i, x in enumerate(losses)]) == []


def healthy_losses(kind: int, steps: int) -> np.ndarray:
    """Curves of trainings that learn, with the noise of twenty kinds of batches."""
    numbers, time = np.random.default_rng(kind), np.arange(steps)
    trend = 0.05 + 8.0 * np.exp(-time / (steps / 6)) + 0.3 * np.exp(-time / 300)
    noise = (
        np.exp(0.1 * numbers.standard_normal(steps)),
        np.exp(0.5 * numbers.standard_normal(steps)),
        np.exp(1.0 * numbers.standard_normal(steps)),
        np.abs(numbers.standard_t(3, steps)),
        numbers.gamma(0.5, 1.0, steps),
        numbers.poisson(0.3, steps) + 0.01,
        numbers.lognormal(0.0, 1.5, steps),
    )[kind % 7]
    if kind % 5 == 0:  # phases: the learning rate falls, the data change
        noise = noise * np.repeat(np.exp(numbers.uniform(-1, 1, 10)), steps // 10 + 1)[:steps]
    if kind % 5 == 1:  # rewards that grow: a loss's value may
        trend = trend + np.cumsum(np.abs(numbers.standard_normal(steps))) / 100
    if kind % 5 == 2:  # a log-likelihood below zero
        return trend * noise - 3.0
    return trend * noise


def test_a_million_healthy_losses_ring_at_most_once() -> None:
    """Twenty kinds of trainings of 50,000 steps; benchmarks would run more of the same."""
    rung = 0
    for kind in range(20):
        detector = SpikeDetector(AlarmBounds().spike)
        rung += sum(map(detector.saw, healthy_losses(kind, 50_000).tolist()))
    assert rung <= 1


def test_weights_in_bf16_that_do_not_move_over_a_hundred_steps(tmp_path: Path) -> None:
    def rung(lr: float, dtype: torch.dtype) -> set[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        store = tmp_path / f"{lr}-{dtype}.db"
        with ampscope.watch(model, optimizer, store=store, every=10, policy="ignore") as run:
            for _ in range(320):
                optimizer.zero_grad()
                model(torch.randn(8, 16).to(dtype)).float().square().mean().backward()
                optimizer.step()
        return {alarm.name for alarm in run.alarms}

    assert "stalled_weights" in rung(1e-6, torch.bfloat16)
    assert "stalled_weights" not in rung(1e-3, torch.bfloat16)
    assert rung(1e-6, torch.float32) == set()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_weight_that_goes_bad_alone_rings(tmp_path: Path, scaled: bool) -> None:
    """A row of a table that no batch asks for: no loss and no gradient says so. Every weight is
    looked at within four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    with ampscope.watch(model, store=tmp_path / "runs.db", policy="ignore") as run:
        for step in range(40):
            optimizer.zero_grad()
            scaler.scale(model(torch.randint(0, 40, (16,))).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 20:
                with torch.no_grad():
                    model[0].weight[45, 0] = float("nan")
    (alarm,) = run.alarms
    assert alarm.name == "nonfinite_weight"
    assert 21 <= alarm.step <= 24
    assert "0.weight" in alarm.text


def test_a_bad_weight_under_a_scaler_rings_at_the_next_step(tmp_path: Path) -> None:
    """GradScaler leaves out every step from there on."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    with ampscope.watch(model, store=tmp_path / "runs.db", policy="ignore") as run:
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 3:
                with torch.no_grad():
                    model.weight[0, 0] = float("nan")
    assert {(a.step, a.name) for a in run.alarms} == {
        (4, "nonfinite_loss"), (4, "nonfinite_weight"),
    }  # fmt: skip


def train_with_penalty(
    store: Path, *, poison: str = "", at: int = 14, init_scale: float = 2.0**20
) -> ampscope.Watch:
    """The gradient penalty of PyTorch's AMP examples: its gradient is scaled and divided again, and
    is infinite as long as the scale is too high. ``poison`` spoils one thing at one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    with ampscope.watch(model, optimizer, scaler, store=store, policy="ignore") as run:
        for step in range(20):
            optimizer.zero_grad()
            inputs = torch.randn(16, 8)
            if step == at and poison == "input":
                inputs[0, 0] = float("nan")
            with torch.autocast("cpu", torch.float16):
                output = model(inputs)
                loss = (output.float() - 1).square().mean()
            if step == at and poison == "vector":
                output = output * float("nan")
            taken = output if poison == "vector" else loss
            ones = torch.ones_like(taken)
            scaled = torch.autograd.grad(
                scaler.scale(taken), list(model.parameters())[:-1], ones, create_graph=True
            )
            unscaled = [gradient / scaler.get_scale() for gradient in scaled]
            penalty = sum(gradient.square().sum() for gradient in unscaled).sqrt()
            if step == at and poison == "penalty":
                penalty = penalty * float("nan")
            scaler.scale(loss + 0.1 * penalty).backward()
            scaler.step(optimizer)
            scaler.update()
    return run


def test_a_loss_that_the_search_for_a_scale_made_infinite_rings_nothing(tmp_path: Path) -> None:
    """GradScaler leaves these steps out and halves the scale, as for any other gradient."""
    run = train_with_penalty(tmp_path / "runs.db")
    found = recorded(run.store, run.id)
    spoilt = [s.step for s in found.steps if not np.isfinite(s.loss)]
    assert spoilt
    assert all(found.steps[i].skipped for i in spoilt)
    assert run.alarms == []
    assert found.of("capsule") == []
    assert [(e.step, e.name) for e in found.of("calibration")] == [(0, "backward")]


@pytest.mark.parametrize("poison", ["input", "vector", "penalty"])
def test_beside_such_a_search_a_loss_that_is_nan_rings_at_its_step(
    tmp_path: Path, poison: str
) -> None:
    run = train_with_penalty(tmp_path / "runs.db", poison=poison)
    assert [(a.step, a.name) for a in run.alarms] == [(14, "nonfinite_loss")]


def test_an_infinite_loss_that_the_optimizer_stepped_with_rings_after_any_search() -> None:
    def rung(*, skipped: bool, of_search: bool) -> list[str]:
        signs = Signs(is_search=of_search)
        bad = step(0, loss=float("nan"), skipped=skipped)
        return [event.name for event in Alarms(AlarmBounds()).check(bad, signs=signs)]

    assert rung(skipped=True, of_search=True) == []
    assert rung(skipped=True, of_search=False) == ["nonfinite_loss"]
    assert rung(skipped=False, of_search=True) == ["nonfinite_loss"]
