"""Starts Keras' children for tests: probes, scripts and programs of tests/ext/frameworks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from ampscope.analysis.run_view import RunView
from ampscope.pythons import with_package
from ampscope.records import Cadence, RunInfo, RunSpec
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

VARIABLE = "AMPSCOPE_KERAS_PYTHON"
PYTHON = os.environ.get(VARIABLE, "")
HERE = Path(__file__).parents[1] / "ext" / "frameworks"
QUIET = Cadence(histogram=0, trace=0, shadow=0)


def program(name: str, *args: str) -> Any:
    """The JSON that a program of tests/ext/frameworks prints last."""
    done = _run([PYTHON, str(HERE / f"{name}.py"), *args])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def probe(store: Path, spec: RunSpec) -> tuple[RunInfo, str]:
    """(the finished run, what its process wrote to standard error)."""
    return _child("ampscope.ext.frameworks.child", store, spec)


def script(store: Path, name: str, control: str = "as_is", steps: int = 60) -> RunView:
    """A script of tests/ext/frameworks/scripts under a control."""
    path = str(HERE / "scripts" / f"{name}.py")
    spec = RunSpec(
        path, kind="script", framework="keras", control=control, steps=steps, time_limit_s=600.0,
        cadence=QUIET,
    )  # fmt: skip
    info, errors = _child("ampscope.ext.frameworks.script", store, spec)
    assert info.state == "finished", (info.message, info.traceback, errors[-2000:])
    with Reader(store) as reader:
        return RunView(control, info.id, reader.observations(info.id))


def _child(module: str, store: Path, spec: RunSpec) -> tuple[RunInfo, str]:
    writer = RunWriter.create(store, spec)
    writer.close()
    done = _run([PYTHON, "-m", module, "--store", str(store), "--run", writer.run_id])
    with Reader(store) as reader:
        return reader.run(writer.run_id), done.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = with_package({**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, env=environment
    )
