"""The lines of code that the lessons show: they run, in the framework that they are written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.ext.lessons.catalog import LESSONS
from ampscope.ext.lessons.mistakes import MISTAKES
from tests.helpers.lessons_of_pages import examples

RUNNER = Path(__file__).parents[2] / "helpers" / "run_snippets.py"
PYTHONS = {
    "PyTorch": ("torch", sys.executable),
    "Paddle": ("paddle", os.environ.get("AMPSCOPE_PADDLE_PYTHON", "")),
    "Keras": ("keras", os.environ.get("AMPSCOPE_KERAS_PYTHON", "")),
}


def snippets(framework: str) -> dict[str, str]:
    """By lesson, or by mistake in lesson 13."""
    return {name: code[framework] for name, code in examples().items()}


def answered(framework: str, asked: dict[str, str]) -> dict[str, str]:
    name, python = PYTHONS[framework]
    if not python:
        pytest.skip(f"AMPSCOPE_{name.upper()}_PYTHON names no Python that has it")
    done = subprocess.run(
        [python, "-W", "ignore", str(RUNNER), name],
        input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", PYTHONS)
def test_every_lesson_s_lines_run(framework: str) -> None:
    asked = snippets(framework)
    measured = [one.id for one in LESSONS.values() if one.is_measured]
    assert list(asked) == [*measured, *(one.id for one in MISTAKES)]
    wrong = {name: error for name, error in answered(framework, asked).items() if error}
    assert wrong == {}


@pytest.mark.timeout(600)
def test_lines_that_do_not_run_are_found() -> None:
    wrong = answered("PyTorch", {"bad": "torch.no_such_function()", "good": "torch.rand(1)"})
    assert "no_such_function" in wrong["bad"]
    assert wrong["good"] == ""
