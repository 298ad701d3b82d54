"""What a machine that trains has, and what it lacks: the dashboard's packages are refused here, as
on a machine with a GPU where they were never installed."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("streamlit", "plotly", "playwright", "jsonschema")
REFUSING = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def without_dashboard(tmp_path: Path) -> dict[str, str]:
    """An environment whose Python refuses the packages."""
    (tmp_path / "sitecustomize.py").write_text(REFUSING)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "core")])
    return {**os.environ, "PYTHONPATH": path}


def pytest_there(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_packages_are_refused(without_dashboard: dict[str, str]) -> None:
    for name in ABSENT:
        command = [sys.executable, "-c", f"import {name}"]
        ended = subprocess.run(command, env=without_dashboard, capture_output=True, check=False)
        assert b"ModuleNotFoundError" in ended.stderr


def test_tests_run_where_the_dashboard_is_not_installed(without_dashboard: dict[str, str]) -> None:
    """The fixtures of all tests asked for Streamlit: each test ended as an error in its set-up."""
    test = "tests/numerics/test_formats.py"
    ended = pytest_there(test, environment=without_dashboard)
    assert ended.returncode == 0, ended.stdout[-2_000:]
    assert " passed" in ended.stdout


def test_the_tests_for_a_gpu_are_collected_there(without_dashboard: dict[str, str]) -> None:
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    )
    ended = pytest_there("-m", "gpu", "--collect-only", *files, environment=without_dashboard)
    assert ended.returncode == 0, ended.stdout[-2_000:]
    collected = re.search(r"(\d+)/\d+ tests collected", ended.stdout)
    assert collected is not None
    assert int(collected[1]) >= 18


@pytest.mark.slow
def test_all_that_a_gpu_is_asked_first_works_there(
    without_dashboard: dict[str, str], tmp_path: Path
) -> None:
    """Nine parts in their smallest form, which a device would answer in seven minutes: each wrote
    figures and failed in nothing, in the time that two cores have in four minutes."""
    out = tmp_path / "out"
    command = ["bash", str(ROOT / "benchmarks" / "gpu" / "run"), "--dry", "first"]
    environment = {**without_dashboard, "PYTHON": sys.executable, "OUT": str(out)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stdout[-3_000:]
    summary = json.loads((out / "summary.json").read_text())
    host = ["host-tests", "host-rehearsals"]
    first = [name for name in summary["parts"] if name not in host]
    assert first == [
        "look", "tests", "diagnose", "rehearsed", "price", "overhead", "ceilings", "compare",
        "cores",
    ]  # fmt: skip
    documents = {"look": summary["look"]}
    for file in {part["file"] for part in summary["parts"].values()} - {"summary.json"}:
        documents |= json.loads((out / file).read_text())["parts"]
    for name in first:
        assert documents[name]["figures"], name
        assert not any(figure["believable"] for figure in documents[name]["figures"].values())
    assert documents["look"]["figures"]["first_step elements_in_another_bin"]["value"] == 0
    assert documents["diagnose"]["figures"]["C72 right"]["value"] == 1
    files = list(out.iterdir())
    assert len(files) <= 7
    assert all(file.stat().st_size < 1_000_000 for file in files)
    used_s = sum(getattr(after, k) - getattr(before, k) for k in ("ru_utime", "ru_stime"))
    assert used_s < 2 * 240
