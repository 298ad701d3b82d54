"""Replay: over real recorded runs at their own settings, and over histograms made by hand."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ampscope.cli.main import main as ampscope
from ampscope.launcher.launch import launch
from ampscope.numerics.formats import FP16
from ampscope.numerics.histogram import FIRST, LOWEST, RAW_LEN
from ampscope.observations import Call
from ampscope.records import Frame, Role, RunSpec, ScalerSpec, State, StepRecord
from ampscope.scalers.replay import (
    POLICIES,
    Fate,
    RecordedRun,
    ScalerSettings,
    StepGradients,
    UpdateWindow,
    fate,
    first_scales,
    lost_shares,
    own_settings,
    recorded_run,
    replay,
    update_windows,
)
from ampscope.store.reader import Reader
from ampscope.zoo.answers import script_path
from benchmarks.zoo_replay import replayed
from tests.helpers.child_runs import wait_until

GRADIENTS = (Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)


def read(reader: Reader, run_id: str) -> RecordedRun:
    def frames_of(step: int) -> Sequence[Frame]:
        found = (reader.frame(run_id, role, step) for role in GRADIENTS)
        return [frame for frame in found if frame is not None]

    return recorded_run(reader.steps(run_id), frames_of, FP16)


@pytest.mark.parametrize(
    ("workload", "scaler"),
    [
        ("gpt", ScalerSpec(2.0**24, growth_interval=5)),
        ("lenet", ScalerSpec(2.0**30, growth_interval=3)),
        ("mlp", ScalerSpec(2.0**16, growth_interval=4, growth_factor=8.0)),
    ],
)
def test_at_its_own_settings_it_is_what_was_recorded(
    tmp_path: Path, workload: str, scaler: ScalerSpec
) -> None:
    spec = RunSpec(workload, steps=25, scaler=scaler)
    run_id = launch(spec, tmp_path / "s.db")
    assert wait_until(tmp_path / "s.db", run_id).state is State.FINISHED
    with Reader(tmp_path / "s.db") as reader:
        steps, run = reader.steps(run_id), read(reader, run_id)
    settings = ScalerSettings(
        scaler.init_scale, scaler.growth_interval, scaler.growth_factor, scaler.backoff_factor
    )
    found = replay(run.gradients, POLICIES["torch"], settings)
    assert [s.scale for s in found.steps] == [s.scale for s in steps]
    assert [s.skipped for s in found.steps] == [s.skipped for s in steps]
    assert found.guesses == ()
    assert found.skips == sum(s.skipped for s in steps) > 0


def test_a_probes_own_settings_are_those_it_was_asked_for_where_its_framework_has_them() -> None:
    asked = ScalerSpec(1000.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=4)
    own = {
        name: own_settings(RunSpec("shared-mlp", framework=name, scaler=asked), 1000.0)
        for name in ("torch", "paddle", "keras")
    }
    assert own["torch"] == own["paddle"] == ScalerSettings(1000.0, 4, 3.0, 0.25)
    assert own["keras"] == ScalerSettings(1000.0, 4, 2.0, 0.5)
    script = RunSpec("train.py", kind="script", framework="keras", scaler=asked)
    assert own_settings(script, 64.0) == ScalerSettings(64.0, 2000)


@pytest.mark.parametrize(("first", "second"), [(2.0**8, 2.0**24), (2.0**24, 2.0**8)])
def test_what_it_says_of_another_scale_is_what_a_run_at_that_scale_does(
    tmp_path: Path, first: float, second: float
) -> None:
    """An oracle: the very steps, run at the other scale. Frozen, so that both see one gradient."""
    store = tmp_path / "s.db"
    runs = {}
    for scale in (first, second):
        scaler = ScalerSpec(scale, growth_interval=1_000)
        run_id = launch(RunSpec("lenet", steps=1, scaler=scaler), store)
        assert wait_until(store, run_id).state is State.FINISHED
        runs[scale] = run_id
    with Reader(store) as reader:
        seen, other = read(reader, runs[first]), reader.steps(runs[second])[0]
    said = fate(seen.gradients[0], second)
    expected = Fate.OVERFLOW if other.skipped else Fate.FINITE
    assert said in (expected, Fate.UNKNOWN)
    assert (said is Fate.UNKNOWN) == (seen.gradients[0].found_inf and second < first)


def step(top: int | None, scale: float = 1024.0, found_inf: bool = False) -> StepGradients:
    return StepGradients(0, scale, found_inf, top, FP16.max_exponent)


@pytest.mark.parametrize(
    ("top", "factor", "expected"),
    [
        (10, 2.0**5, Fate.FINITE),  # [2^15, 2^16) holds fp16 numbers up to 65,504 only
        (10, 2.0**6, Fate.OVERFLOW),
        (10, 2.0**5.5, Fate.COARSE),
        (10, 2.0**6.5, Fate.OVERFLOW),
        (10, 0.3, Fate.FINITE),
        (None, 2.0**60, Fate.FINITE),
    ],
)
def test_fates(top: int | None, factor: float, expected: Fate) -> None:
    assert fate(step(top), 1024.0 * factor) is expected


def test_nothing_is_known_of_a_step_at_scale_zero() -> None:
    assert fate(replace(step(3), scale=0.0), 1024.0) is Fate.UNKNOWN
    assert fate(step(3), 0.0) is Fate.UNKNOWN


def test_the_limit_of_fates_against_torch() -> None:
    """Every fp16 number times every power of two: does torch overflow where the bins say?"""
    bits = torch.arange(1, 0x7C00, dtype=torch.int16)
    values = bits.view(torch.float16)
    exponents = torch.frexp(values.float())[1] - 1
    for shift in range(1, 20):
        overflows = torch.isinf((values.float() * 2.0**shift).half())
        for exponent in (-14, 0, 15 - shift, 16 - shift):
            inside = overflows[exponents == exponent]
            said = fate(step(exponent), 1024.0 * 2.0**shift)
            assert bool(inside.all()) == (said is Fate.OVERFLOW)
            assert bool(inside.any()) == (said is Fate.OVERFLOW)


def test_what_overflowed_tells_nothing_of_smaller_scales() -> None:
    recorded = step(None, 2.0**20, found_inf=True)
    assert fate(recorded, 2.0**21) is Fate.OVERFLOW
    assert fate(recorded, 2.0**10) is Fate.UNKNOWN
    after = StepGradients(1, 2.0**12, False, 10, FP16.max_exponent)
    found = replay([recorded, after], POLICIES["torch"], ScalerSettings(2.0**10, 100))
    assert [s.skipped for s in found.steps] == [False, False]
    assert found.guesses == (0,)
    assert found.first_guess == 0


def frame(counts: dict[int, int], at: int = 0) -> Frame:
    row = np.zeros((1, RAW_LEN), np.int64)
    for exponent, count in counts.items():
        row[0, FIRST + exponent - LOWEST] = count
    return Frame(at, Role.GRAD_OUTPUT, (1,), ("fp16",), row, 1.0)


def test_lost_shares_are_counted_by_hand() -> None:
    """fp16 loses what lies below 2^-25 after rounding to nearest."""
    counts = {-30: 10, -20: 30, -5: 60}
    run = recorded_run([StepRecord(0, scale=1.0)], lambda _: [frame(counts)], FP16)
    for scale, share in ((1.0, 0.1), (2.0**-6, 0.4), (2.0**5, 0.0), (2.0**-21, 1.0)):
        made = replay(run.gradients, POLICIES["torch"], ScalerSettings(scale, 100))
        below = FP16.zero_below_exponent - int(math.log2(scale))
        by_hand = sum(n for e, n in counts.items() if e < below) / 100
        assert by_hand == share
        assert lost_shares(run, made) == [share]


def test_a_thousand_steps_of_two_hundred_layers_take_less_than_a_second() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 9, (200, RAW_LEN))
    rows[:, 160:] = 0
    frames = [Frame(0, role, tuple(range(200)), ("fp16",) * 200, rows, 1.0) for role in GRADIENTS]
    steps = [StepRecord(n, scale=2.0**16) for n in range(1000)]
    started = time.process_time()
    run = recorded_run(steps, lambda _: frames, FP16)
    made = replay(run.gradients, POLICIES["paddle"], ScalerSettings(2.0**15, 100))
    lost_shares(run, made)
    # Processor time: other programs on the machine do not add to it.
    elapsed_s = time.process_time() - started
    assert elapsed_s < 1.0


@pytest.mark.parametrize("script", ["c98_high_initial_scale.py", "h07_clip_and_schedule.py"])
def test_a_zoo_script_replays_as_it_was_recorded(tmp_path: Path, script: str) -> None:
    """The whole zoo is replayed by benchmarks/zoo_replay.py."""
    store = tmp_path / "runs.db"
    command = ["run", "--quiet", "--steps", "40", "--store", str(store), str(script_path(script))]
    assert CliRunner().invoke(ampscope, command).exit_code == 0
    with Reader(store) as reader:
        (info,) = reader.runs(1)
        row = replayed(reader, info)
    assert row is not None
    assert row["first_difference"] is None, row


def test_steps_that_share_an_update_halve_the_scale_once() -> None:
    """A GAN: two optimizers step, one update. Written down by hand."""
    calls = [
        call
        for n in range(3)
        for call in (
            Call(0, 2 * n, "scaler_step", subject="scaler0"),
            Call(0, 2 * n + 1, "scaler_step", subject="scaler0"),
            Call(0, 2 * n + 2, "update", subject="scaler0"),
        )
    ]
    steps = [StepRecord(n, scale=2.0**s) for n, s in enumerate((16, 16, 15, 15, 14, 14))]
    updates = update_windows(calls, steps)
    assert [update.places for update in updates] == [(0, 1), (2, 3), (4, 5)]
    # the first optimizer's largest gradient overflows from 2^15 up, the other's never does
    gradients = [
        StepGradients(n, 1.0, False, 1 if n % 2 == 0 else -9, FP16.max_exponent) for n in range(6)
    ]
    made = replay(gradients, POLICIES["torch"], ScalerSettings(2.0**16, 2000), updates)
    assert [s.scale for s in made.steps] == [2.0**e for e in (16, 16, 15, 15, 14, 14)]
    assert [s.skipped for s in made.steps] == [True, False, True, False, False, False]


def test_a_step_outside_the_scaler_is_no_turn() -> None:
    calls = [Call(0, 0, "scaler_step", subject="scaler0"), Call(0, 1, "update", subject="scaler0")]
    steps = [StepRecord(0, scale=4.0), StepRecord(1)]
    assert update_windows(calls, steps) == (UpdateWindow("scaler0", (0,)),)
    assert update_windows([], steps) == (UpdateWindow("scaler0", (0,)),)
    assert first_scales(update_windows(calls, steps), steps) == {"scaler0": 4.0}
