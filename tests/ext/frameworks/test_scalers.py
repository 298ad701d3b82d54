"""Several scalers in one script of Keras or Paddle, and several optimizers at one scaler: each step
is known by its scaler, and the replay of every scaler is what the framework's real one did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.numerics.formats import FP16
from ampscope.observations import Call
from ampscope.scalers.replay import first_difference, own_policy, recorded_run
from ampscope.store.reader import Reader
from tests.helpers import keras_children, paddle_python

needs_keras = pytest.mark.skipif(
    not keras_children.PYTHON, reason=f"{keras_children.VARIABLE} names no Python that has Keras"
)
pytestmark = pytest.mark.timeout(600)


def recorded(store: Path, name: str) -> Path:
    """``store`` with one run of a script of tests/ext/frameworks/scripts."""
    if name.startswith("keras"):
        keras_children.script(store, name)
    else:
        paddle_python.script_view(store, name, "as_is")
    return store


def parts_at(store: Path, growth_interval: int, *, last_decides: bool | None = None) -> int | None:
    """The first step at which the replay is not what was recorded."""
    with Reader(store) as reader:
        (run,) = reader.runs()
        steps = reader.steps(run.id)
        calls = [o for o in reader.observations(run.id) if isinstance(o, Call)]
    policy = own_policy(run.spec)
    if last_decides is not None:
        policy = replace(policy, last_decides=last_decides)
    own = replace(policy.defaults, growth_interval=growth_interval)
    seen = recorded_run(steps, lambda step: (), FP16, calls)
    return first_difference(seen, steps, policy, own)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("keras_two_scalers", marks=needs_keras),
        pytest.param("paddle_two_scalers", marks=paddle_python.needs_paddle),
    ],
)
def test_every_step_is_known_by_its_scaler(tmp_path: Path, name: str) -> None:
    store = recorded(tmp_path / "runs.db", name)
    with Reader(store) as reader:
        (run,) = reader.runs()
        steps = reader.steps(run.id)
        calls = [o for o in reader.observations(run.id) if isinstance(o, Call)]
    subjects = [c.subject for c in calls if c.name == "update"]
    assert subjects == ["scaler0", "scaler1"] * 20
    first, second = steps[0::2], steps[1::2]
    assert [first[0].scale, second[0].scale] == [2.0**24, 2.0**4]
    assert first[-1].scale is not None
    assert first[-1].scale < 2.0**24  # it fell
    assert second[-1].scale is not None
    assert second[-1].scale > 2.0**4  # it grew
    assert parts_at(store, 6) is None


@paddle_python.needs_paddle
def test_of_two_optimizers_at_one_scaler_paddle_heeds_the_last(tmp_path: Path) -> None:
    store = recorded(tmp_path / "runs.db", "paddle_shared_scaler")
    with Reader(store) as reader:
        (run,) = reader.runs()
        steps = reader.steps(run.id)
    assert {step.skipped for step in steps[0::2]} == {True}
    assert {step.skipped for step in steps[1::2]} == {False}
    assert [step.scale for step in steps[0::8]] == [2.0**n for n in range(16, 22)]  # it only grows
    assert parts_at(store, 4) is None
    assert parts_at(store, 4, last_decides=False) == 2  # as PyTorch would have it
