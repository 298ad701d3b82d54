"""Plain Paddle scripts with planted faults, recorded and judged; see test_paddle.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.diagnosis.findings import Diagnosis, diagnose
from tests.helpers.paddle_python import SCRIPTS, VARIABLE, checked, needs_paddle, script_view

pytestmark = [needs_paddle, pytest.mark.timeout(1500)]  # 30 trainings, one process each
EXPECTED = {
    "paddle_healthy": "",
    "paddle_healthy_o2": "",
    "paddle_fit": "",
    "paddle_overflow": "activation_overflow",
    "paddle_vanished": "elementwise_overflow",
    "paddle_scale_too_high": "loss_scale_too_high",
    "paddle_scale_static": "loss_scale_too_high",
    "paddle_underflow": "gradient_underflow",
    "paddle_nan_data": "bad_input_data",
    "paddle_learning_rate": "not_amp_divergence",
    "paddle_half_state": "optimizer_state_range",
    "paddle_half_weights": "small_update_lost",
}


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, RunView]]:
    """Every script as it is and in fp32, and where steps were skipped with the scale held at 1."""
    if not os.environ.get(VARIABLE):
        pytest.skip("no Paddle")
    store = tmp_path_factory.mktemp("paddle") / "runs.db"
    found: dict[str, dict[str, RunView]] = {}
    for name in EXPECTED:
        runs = {control: script_view(store, name, control) for control in ("as_is", "fp32")}
        if runs["as_is"].skips:
            runs["scale:1"] = script_view(store, name, "scale:1")
        found[name] = runs
    return found


def _diagnosis(views: dict[str, RunView]) -> Diagnosis:
    return diagnose(Evidence(views, "cuda"))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_planted_cause_is_named_first(views: dict[str, dict[str, RunView]], name: str) -> None:
    found = _diagnosis(views[name])
    assert [f.cause for f in found.findings][:1] == ([EXPECTED[name]] if EXPECTED[name] else [])
    assert not [rule.id for rule, verdict in found.answers if verdict.status == "errored"]


def test_every_script_was_planned_and_counted_like_paddle_counts() -> None:
    script = str(SCRIPTS / "paddle_healthy_o2.py")
    command = [sys.executable, "-m", "ampscope.cli.main", "frameworks", "plan", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "conv2d" in done.stdout
    assert "count the same ops" in done.stdout


def test_the_overflowing_layer_is_recorded_with_its_fp32_twin(
    views: dict[str, dict[str, RunView]], tmp_path: Path
) -> None:
    expected = checked("overflowed_layer", tmp_path)
    bad = views["paddle_overflow"]["as_is"].bad_ops[0]
    assert (bad.module, bad.module_type, bad.dtype, bad.reached_loss) == (
        "wide",
        "Linear",
        "fp16",
        True,
    )
    assert bad.line.startswith("paddle_overflow.py:")
    assert bad.fp32_max == pytest.approx(expected["largest"], rel=2e-3)
    assert bad.total == expected["total"]
    assert bad.nan == expected["nan"]
    assert abs(bad.pos_inf + bad.neg_inf - expected["inf"]) <= 0.01 * expected["total"]


def test_a_nan_in_the_data_is_seen_before_any_layer(
    views: dict[str, dict[str, RunView]],
) -> None:
    for control in ("as_is", "fp32"):
        batches = [s for s in views["paddle_nan_data"][control].scans if s.moment == "batch"]
        assert [s.step for s in batches if s.nan] == list(range(4, 40, 5))
        assert {s.nan for s in batches} == {0, 1}


def test_accumulation_and_schedule_are_seen(views: dict[str, dict[str, RunView]]) -> None:
    run = views["paddle_healthy_o2"]["as_is"]
    assert len(run.steps) == 30
    assert {a.backwards for a in run.steps} == {2}
    # StepDecay by hand: 0.02 halved every ten optimizer steps.
    assert [a.lr for a in run.steps] == pytest.approx([0.02 * 0.5 ** (i // 10) for i in range(30)])
    assert {a.weight_dtypes for a in run.steps} == {"fp16+fp32"}  # BatchNorm stays fp32
    assert {a.state_dtypes for a in run.steps} == {"fp32"}
    fp32 = views["paddle_healthy_o2"]["fp32"].steps
    assert run.steps[0].loss == pytest.approx(fp32[0].loss, rel=5e-3)
    assert run.steps[0].grad_norm == pytest.approx(fp32[0].grad_norm, rel=2e-2)


def test_fixes_cure_what_they_are_for(views: dict[str, dict[str, RunView]], tmp_path: Path) -> None:
    store = tmp_path / "fixes.db"

    def after(name: str, control: str) -> RunView:
        return script_view(store, name, control)

    overflow = after("paddle_overflow", "fp32_modules:wide")
    assert overflow.skips == []
    assert overflow.bad_ops == []
    assert after("paddle_scale_too_high", "init_scale:1024").skips == []
    scaled = after("paddle_underflow", "add_scaler")
    assert scaled.has_scaler
    before, fp32 = (views["paddle_underflow"][c].steps[0] for c in ("as_is", "fp32"))
    assert before.grad_zero > 0.9 * before.grad_total
    assert scaled.steps[len(scaled.skips)].grad_zero < 0.05 * fp32.grad_total
    slower = after("paddle_learning_rate", "lr:0.002")
    assert slower.steps[0].lr == pytest.approx(0.01)
    assert not slower.bad_loss_steps
    constant = after("paddle_scale_too_high", "scale:256;growth_interval:2")
    assert {a.scale for a in constant.steps} == {256.0}


def test_a_script_that_raises_and_one_that_is_stopped(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    stopped = script_view(store, "paddle_healthy", steps=5)
    assert (stopped.outcome.ended, len(stopped.steps)) == ("steps", 5)
