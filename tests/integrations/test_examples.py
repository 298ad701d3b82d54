"""The examples run as they are printed, and record what they train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.records import State
from tests.helpers.trainers import recorded

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {"plain_loop": 40, "lightning_run": 40, "transformers_run": 20, "accelerate_run": 40}
NEEDS = {"lightning_run": "lightning", "transformers_run": "transformers"}
NEEDS["accelerate_run"] = "accelerate"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    store = tmp_path / "runs.db"
    environment = os.environ | {
        "AMPSCOPE_STORE": str(store), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        capture_output=True, text=True, timeout=180, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    info, steps = recorded(store)
    assert (info.state, len(steps)) == (State.FINISHED, EXAMPLES[name])
    assert f"run {info.id} in {store}" in found.stdout


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
