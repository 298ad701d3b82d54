"""Runs whose command line was killed: said on Home whose they are, and stopped from there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.records import State
from ampscope.store.processes import whose
from ampscope.store.reader import Reader
from tests.helpers import stores
from tests.helpers.child_runs import run_command, started_runs, terminal, wait_until, workload_file
from tests.helpers.pages import texts

Open = Callable[..., Any]


def is_asked(store: Path, run_id: str) -> bool:
    with Reader(store) as reader:
        found = reader._all("SELECT cancel FROM run WHERE id=?", run_id)
    return bool(found[0][0])


def test_a_process_says_whose_it_is() -> None:
    assert f"process {os.getpid()} of " in whose(os.getpid())
    assert whose(None) == whose(2**22 + 1) == ""


def test_home_says_whose_a_run_is_and_stops_it(store_path: Path, open_page: Open) -> None:
    ended = stores.finished(store_path)
    running = stores.running(store_path, replace(stores.SPEC, group=""))
    app = open_page("home")
    assert f"Process {os.getpid()} of " in texts(app)
    assert [b.key for b in app.button if "stop-" in str(b.key)] == [f"stop-{running}"]
    next(b for b in app.button if b.key == f"stop-{running}").click().run()
    assert not app.exception
    assert is_asked(store_path, running)
    assert not is_asked(store_path, ended)


def test_the_queued_precision_of_a_probe_is_stopped_alone(
    store_path: Path, open_page: Open
) -> None:
    spec = replace(stores.SPEC, group="g1")
    running = stores.running(store_path, spec)
    queued = stores.queued(store_path, replace(spec, precision="bf16"))
    app = open_page("home")
    next(b for b in app.button if b.key == f"stop-{queued}").click().run()
    assert is_asked(store_path, queued)
    assert not is_asked(store_path, running)


def test_all_runs_are_stopped_from_the_command_line(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    running, ended = stores.running(store), stores.finished(store)
    done = run_command("runs", "stop", "--all", "--store", store)
    assert done.returncode == 0
    assert f"{running} (gpt tiny fp16) was asked to stop." in done.stdout
    assert ended not in done.stdout
    assert is_asked(store, running)
    assert run_command("runs", "stop", "--store", store).returncode == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them there alone")
def test_a_run_ends_with_its_command_line_and_keeps_its_steps(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    name = workload_file(tmp_path, "slow", "time.sleep(0.1)")
    with terminal(store, "probe", name, "--precision", "fp32", "--steps", 9000) as process:
        (run_id,) = started_runs(store, 1)
        child = wait_until(store, run_id, lambda info: info.steps_done > 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        info = wait_until(store, run_id)
    assert info.state is State.LOST
    assert info.steps_done >= child.steps_done
    assert "has ended" in whose(info.pid) or not whose(info.pid)
