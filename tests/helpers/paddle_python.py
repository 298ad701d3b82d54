"""Starting the Python that has Paddle, named by AMPSCOPE_PADDLE_PYTHON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ampscope.analysis.run_view import RunView
from ampscope.pythons import with_package
from ampscope.records import Cadence, RunInfo, RunSpec
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

VARIABLE = "AMPSCOPE_PADDLE_PYTHON"
SCRIPTS = Path(__file__).parents[1] / "ext" / "frameworks" / "scripts"
LIMIT_S = 280
needs_paddle = pytest.mark.skipif(
    not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no Python that has Paddle"
)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Paddle's Python, with this package on its path."""
    return subprocess.run(
        [os.environ[VARIABLE], "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=with_package(dict(os.environ)),
    )


def checked(name: str, folder: Path) -> Any:
    """What tests/ext/frameworks/paddle_checks.py answers."""
    script = Path(__file__).parents[1] / "ext" / "frameworks" / "paddle_checks.py"
    done = call(str(script), name, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def started(store: Path, spec: RunSpec) -> tuple[str, subprocess.Popen[bytes]]:
    """A probe's run, and its process."""
    writer = RunWriter.create(store, spec)
    writer.close()
    command = [os.environ[VARIABLE], "-W", "ignore", "-m", "ampscope.ext.frameworks.child"]
    process = subprocess.Popen(
        [*command, "--store", str(store), "--run", writer.run_id],
        stderr=subprocess.DEVNULL,
        env=with_package(dict(os.environ)),
    )
    return writer.run_id, process


def run(store: Path, spec: RunSpec, module: str) -> RunInfo:
    """Run ``spec`` in a child; how it ended."""
    writer = RunWriter.create(store, spec)
    writer.close()
    done = call(
        "-m", f"ampscope.ext.frameworks.{module}", "--store", str(store), "--run", writer.run_id
    )
    with Reader(store) as reader:
        info = reader.run(writer.run_id)
    assert info.state == "finished", (info.message, info.traceback, done.stderr[-2000:])
    return info


def script_view(store: Path, name: str, control: str = "as_is", steps: int = 200) -> RunView:
    """One of the scripts under one control."""
    spec = RunSpec(
        workload=str(SCRIPTS / f"{name}.py"), kind="script", steps=steps, framework="paddle",
        control=control, cadence=Cadence(1, 1, 0), time_limit_s=120.0,
    )  # fmt: skip
    info = run(store, spec, "script")
    with Reader(store) as reader:
        return RunView(control, info.id, reader.observations(info.id))
