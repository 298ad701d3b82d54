"""Healthy trainings are not accused: each script of tests/healthy goes through the command line.

All of them take half an hour on two cores, so they carry the marker ``thorough`` and run when they
are asked for: ``pytest --thorough`` or ``pytest -m thorough``. A few stand for the rest otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.healthy import SCRIPTS, diagnosed

NAMES = sorted(p.stem for p in SCRIPTS.glob("*.py") if p.stem != "__init__")
# One for each kind of evidence that was once misread: rounding, the scale's search, who unscales,
# a limit that cuts nothing, a loss that grows, an evaluation with infinities; and steps that
# evaluate more than once.
ALWAYS = (
    "asam_two_scalers",
    "bf16_stochastic_rounding",
    "clip_inf_logs_norm",
    "critic_bf16_loss_grows",
    "extragradient_amp",
    "lbfgs_closure_scaled",
    "lookahead_through_scaler",
    "masked_policy_eval",
    "sam_amp",
    "sam_updates_between",
    "scale_search_from_2_32",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.thorough]) for name in NAMES],
)
def test_a_healthy_training_is_not_accused(name: str, tmp_path: Path) -> None:
    said = diagnosed(name, tmp_path)
    assert (said["exit_status"], said["verdict"], said["findings"]) == (0, "no_fault", []), said


def test_the_suite_is_as_large_as_it_says() -> None:
    assert len(NAMES) >= 70
    assert set(ALWAYS) <= set(NAMES)
