"""The child that has loaded torch and waits: it does the next run, or ends; no run is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ampscope.launcher import children
from ampscope.launcher.launch import follow, launch
from ampscope.records import RunInfo, State

lessons = pytest.importorskip("ampscope.ext.lessons.catalog")
SPEC = lessons.lesson_spec("accumulate")


def waiting(pid: int) -> list[psutil.Process]:
    """Children of ``pid`` that have not been told a run."""
    found = []
    for process in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            line = process.cmdline()
            if "ampscope.runner" in line and "--run" not in line:
                found.append(process)
    return found


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def measured(store: Path) -> RunInfo:
    *_, info = follow(store, launch(SPEC, store))
    return info


def has_loaded(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


@pytest.mark.timeout(180)
def test_it_does_the_next_run_and_only_one(store_path: Path) -> None:
    children.expect(store_path)
    children.expect(store_path)
    (process,) = waiting(os.getpid())
    until(lambda: has_loaded(process))
    info = measured(store_path)
    assert info.state is State.FINISHED, info.message
    assert info.pid == process.pid
    until(lambda: not waiting(os.getpid()))
    assert measured(store_path).pid != process.pid


@pytest.mark.timeout(180)
def test_a_run_goes_on_without_it_when_it_is_gone(store_path: Path) -> None:
    children.expect(store_path)
    (process,) = waiting(os.getpid())
    process.send_signal(signal.SIGKILL)
    until(lambda: not waiting(os.getpid()))
    assert measured(store_path).state is State.FINISHED


@pytest.mark.timeout(180)
def test_it_does_not_wait_for_ever(store_path: Path) -> None:
    children.expect(store_path, idle_s=0.2)
    until(lambda: not waiting(os.getpid()))
    assert measured(store_path).state is State.FINISHED


@pytest.mark.timeout(180)
def test_it_ends_with_its_parent(store_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; "
            "from ampscope.launcher.children import expect; "
            "expect(Path(sys.argv[1])); time.sleep(600)",
            str(store_path),
        ]
    )
    until(lambda: bool(waiting(parent.pid)))
    (process,) = waiting(parent.pid)
    parent.kill()
    parent.wait()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
