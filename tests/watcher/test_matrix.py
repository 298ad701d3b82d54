"""Some cells of the matrix of trainers, ranks, torch.compile and precisions, as it is measured by
benchmarks/watch_matrix.py: equal bits watched and unwatched, and a planted NaN rings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MATRIX = Path(__file__).resolve().parents[2] / "benchmarks" / "watch_matrix.py"

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not sys.platform.startswith("linux"),
    reason="needs torch.distributed with gloo",
)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param("plain/ddp/eager/fp16", marks=pytest.mark.thorough),
        pytest.param("accelerate/fsdp2/eager/bf16", marks=pytest.mark.thorough),
        pytest.param("lightning/ddp/compiled/fp16", marks=pytest.mark.thorough),
        pytest.param("transformers/single/compiled/bf16", marks=pytest.mark.thorough),
    ],
)
def test_a_cell_of_the_matrix(cell: str, tmp_path: Path) -> None:
    out = tmp_path / "matrix.json"
    done = subprocess.run(
        [sys.executable, str(MATRIX), cell, "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=290, env=os.environ,
    )  # fmt: skip
    assert out.exists(), done.stderr[-2000:]
    (found,) = json.loads(out.read_text())["cells"].values()
    if found["verdict"] == "not installed":
        pytest.skip(found["message"])
    assert found["verdict"] == "passed", found["message"]
