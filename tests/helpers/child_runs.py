"""Real child processes in tests: workload files that misbehave, and waiting for a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ampscope.errors import StoreError
from ampscope.records import RunInfo
from ampscope.store.reader import Reader
from ampscope.store.writer import request_cancel

PATIENCE_S = 120.0  # a child imports torch, on a machine that may be busy
HEAD = """
import time

import torch
from torch import nn

from ampscope import Workload

calls = 0


def loss(model, batch):
    global calls
    calls += 1
    value = model(batch).square().mean()
"""
TAIL = """
    return value


def build(seed):
    return Workload(
        model=nn.Linear(4, 2),
        batches=[torch.ones(2, 4)],
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


def cases_of_this_run(request: pytest.FixtureRequest) -> set[str]:
    """Ids of parameters in the tests of the file that will run, for a fixture that all of them
    share and that starts a process for each."""
    items = (item for item in request.session.items if item.path == request.path)
    going = (item for item in items if item.get_closest_marker("skip") is None)
    return {item.name.partition("[")[2].rstrip("]") for item in going}


def workload_file(folder: Path, name: str, in_loss: str) -> str:
    """A workload whose loss does ``in_loss`` besides; returns its name for a RunSpec."""
    file = folder / f"{name}.py"
    file.write_text(f"{HEAD}    {in_loss}\n{TAIL}")
    return f"{file}:build"


def wait_until(
    store: Path, run_id: str, condition: Callable[[RunInfo], bool] | None = None
) -> RunInfo:
    """The run, as soon as the condition holds; without one, as soon as it has ended."""
    deadline = time.monotonic() + PATIENCE_S
    with Reader(store) as reader:
        while True:
            info = reader.run(run_id)
            if condition(info) if condition else not info.state.is_active:
                return info
            assert info.state.is_active, f"ended too early: {info.state}, {info.message}"
            assert time.monotonic() < deadline, f"still {info.state}, {info.steps_done} steps"
            time.sleep(0.02)


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ampscope.cli.main", *map(str, arguments)]


@contextlib.contextmanager
def terminal(store: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`ampscope ARGUMENTS` while it runs. Nothing is left running, whatever the test does."""
    command = [*command_line(*arguments), "--store", str(store)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            with contextlib.suppress(StoreError), Reader(store) as reader:
                for info in reader.runs():
                    request_cancel(store, info.id)


def started_runs(store: Path, count: int) -> list[str]:
    """Ids of the runs in the store, in the order of their start, once there are ``count``."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(StoreError), Reader(store) as reader:
            infos = reader.runs()
            if len(infos) == count:
                return [info.id for info in reversed(infos)]
        time.sleep(0.02)
    raise AssertionError(f"{store} does not hold {count} runs")


def run_command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`ampscope ARGUMENTS` as a person starts it, in a terminal of 80 columns."""
    env = {**os.environ, "COLUMNS": "80", **environment}
    return subprocess.run(
        command_line(*arguments), capture_output=True, text=True, env=env, timeout=PATIENCE_S
    )


def assert_one_sentence(done: subprocess.CompletedProcess[str], what: str) -> None:
    """It failed, and said why in one line on standard error, without a traceback."""
    assert done.returncode != 0
    assert len([line for line in done.stderr.splitlines() if what in line]) == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def read_only(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run with the folder mounted read-only, which holds for root as well."""
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    whole = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(folder)]
    return subprocess.run([*whole, *command], capture_output=True, text=True, timeout=120)
