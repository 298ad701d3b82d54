"""Plain Keras scripts: what is recorded of them, which cause is named, which fix cures.

AMPSCOPE_KERAS_PYTHON=/venv-keras/bin/python      pip install tensorflow-cpu numba
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import symptoms
from ampscope.diagnosis.findings import diagnose
from ampscope.scalers.replay import POLICIES, ScalerSettings
from tests.helpers import keras_children
from tests.helpers.keras_children import PYTHON, VARIABLE

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason=f"{VARIABLE} names no Python that has Keras"),
    pytest.mark.timeout(1800),
]
# script -> (cause that is named, intervention that cures it)
EXPECTED = {
    "keras_overflow": ("activation_overflow", "fp32_modules:wide"),
    "keras_scale_high": ("loss_scale_too_high", "init_scale:65536;growth_interval:2000"),
    "keras_static_scale": ("loss_scale_too_high", "scale:1024"),
    "keras_underflow": ("gradient_underflow", "add_scaler"),
    "keras_nan_data": ("bad_input_data", ""),
    "keras_learning_rate": ("not_amp_divergence", "lr:0.01"),
    "keras_half_state": ("optimizer_state_range", "eps:0.0001"),
    "keras_shares": ("reduction_overflow", "fp32_modules:shares"),
    "keras_saturated": ("log_zero_saturation", "fp32_modules:chance"),
    "keras_attention": ("attention_logit_overflow", "fp32_modules:mixer"),
    "keras_healthy_fit": ("", ""),
    "keras_healthy_loop": ("", ""),
}
Runs = Mapping[tuple[str, str], RunView]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every script as it is, in fp32, and with its cure; two processes at a time."""
    store = tmp_path_factory.mktemp("scripts") / "runs.db"
    asked = [
        (name, control)
        for name, (_, cure) in EXPECTED.items()
        for control in ("as_is", "fp32", *([cure] if cure else []))
    ]
    with ThreadPoolExecutor(2) as pool:
        views = pool.map(lambda pair: keras_children.script(store, *pair), asked)
        return dict(zip(asked, views, strict=True))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_cause_is_named(runs: Runs, name: str) -> None:
    evidence = Evidence({c: runs[name, c] for c in ("as_is", "fp32")}, "native")
    found = [finding.cause for finding in diagnose(evidence).findings]
    assert found == ([EXPECTED[name][0]] if EXPECTED[name][0] else [])


@pytest.mark.parametrize("name", [n for n, (_, cure) in EXPECTED.items() if cure])
def test_the_cure_is_applied_and_cures(runs: Runs, name: str) -> None:
    fp32, cured = runs[name, "fp32"], runs[name, EXPECTED[name][1]]
    reference = None if name == "keras_learning_rate" else fp32
    assert symptoms(runs[name, "as_is"], fp32)
    assert not symptoms(cured, reference)


def test_the_overflow_is_in_the_layer_that_was_planted(runs: Runs) -> None:
    (bad,) = runs["keras_overflow", "as_is"].bad_ops
    assert (bad.module, bad.op, bad.dtype) == ("wide", "layer.linear", "fp16")
    assert bad.reached_loss
    assert bad.step == 0
    assert bad.count == 32
    assert bad.fp32_finite
    assert bad.fp32_max > 65504  # beyond fp16
    text = Path(keras_children.HERE / "scripts" / "keras_overflow.py").read_text().splitlines()
    assert "model.fit" in text[int(bad.line.partition(":")[2]) - 1]
    assert bad.inputs[0].max_abs < 4000.0  # readings lie between 200 and 4000
    assert runs["keras_overflow", "fp32"].bad_ops == []


def test_scales_follow_keras_rules(runs: Runs) -> None:
    run = runs["keras_scale_high", "as_is"]
    policy, settings = POLICIES["keras"], ScalerSettings(2.0**40, 2000)
    state = policy.start(settings)
    for step in run.steps:
        assert step.scale == state.scale
        assert step.skipped == (step.grad_nonfinite > 0)
        state = policy.step(state, step.skipped, settings)
    assert len(run.skips) > 12


def test_the_broken_sample_is_seen_before_the_model_is(runs: Runs) -> None:
    for control in ("as_is", "fp32"):
        bad = [s for s in runs["keras_nan_data", control].scans if s.moment == "batch" and s.nan]
        assert next((s.step, s.nan, s.name) for s in bad) == (200 // 32, 1, "input")
    # AMP skips it once an epoch of 20 batches, and goes on.
    assert runs["keras_nan_data", "as_is"].skips == [6, 26]
    assert math.isnan(runs["keras_nan_data", "fp32"].losses[-1])


def test_half_state_is_seen(runs: Runs) -> None:
    first = runs["keras_half_state", "as_is"].steps[0]
    assert (first.state_dtypes, first.weight_dtypes, first.eps) == ("fp16", "fp16", 1e-8)
    assert first.state_zero_share > 0.5  # squares of small gradients
    control = runs["keras_half_state", "fp32"].steps[0]
    assert (control.state_dtypes, control.weight_dtypes) == ("fp32", "fp32")
    # The control begins with the very weights of the script, so the first losses agree.
    assert control.loss == pytest.approx(first.loss, rel=2e-3)


def test_controls_change_precision_and_scaler(runs: Runs) -> None:
    for name in EXPECTED:
        assert runs[name, "as_is"].outcome.uses_autocast == "fp16"
        control = runs[name, "fp32"]
        assert control.outcome.uses_autocast == ""
        assert not control.skips
        assert {a.scale for a in control.steps} == {1.0}
        assert control.outcome.notes == ()


def test_a_healthy_loop_is_recorded_as_it_was_written(runs: Runs) -> None:
    run = runs["keras_healthy_loop", "as_is"]
    assert [a.lr for a in run.steps[:2]] == pytest.approx(
        [5e-3 * (1 + math.cos(math.pi * k / 64)) / 2 for k in (0, 1)], rel=1e-5
    )
    names = {g.name for g in run.gradients}
    assert {"head.kernel", "norm.gamma", "attention._query_dense.kernel"} <= names
    assert {a.backwards for a in run.steps} == {1}
    assert run.losses[-1] < run.losses[0] / 2


def test_what_a_script_asks_for_and_does_not_get_is_said(tmp_path: Path) -> None:
    run = keras_children.script(tmp_path / "runs.db", "keras_own_ways")
    backend, graphs = sorted(run.outcome.notes)
    assert "asks for Keras on jax; it was run on TensorFlow" in backend
    assert "asks for graphs" in graphs
    assert len(run.steps) == 3 * 8
    assert run.losses[-1] < run.losses[0] / 2
