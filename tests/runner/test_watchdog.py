"""The watchdog alone, in a process of its own that hangs in one way or another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.records import RunSpec, State
from ampscope.runner import child_frame
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter, request_cancel

CHILD = """
import ctypes, sys, time
from pathlib import Path
from ampscope.records import Machine, StepRecord
from ampscope.runner import child_frame as watchdog
from ampscope.store.writer import RunWriter

watchdog.HARD_GRACE_S, watchdog.GRACE_S = 3.0, 0.5
writer = RunWriter(Path(sys.argv[1]), sys.argv[2])
writer.adopt()
with watchdog.Watchdog(writer, time_limit_s=float(sys.argv[3])) as dog:
    writer.start(Machine("cpu", "", "native"))
    dog.start_clock()
    writer.add_step(StepRecord(0))
    def the_step_that_hangs():
        {how}
    the_step_that_hangs()
"""
SLEEPS = "time.sleep(600)"
HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(600)"  # C code that does not let other threads run


def run_child(store: Path, run_id: str, how: str, limit_s: float) -> int:
    code = CHILD.replace("{how}", how)
    command = [sys.executable, "-c", code, str(store), run_id, str(limit_s)]
    return subprocess.run(command, capture_output=True, timeout=60).returncode


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def run_id(store: Path) -> str:
    writer = RunWriter.create(store, RunSpec("gpt"))
    writer.close()
    return writer.run_id


def test_a_step_that_sleeps_is_ended_and_says_where_it_stood(store: Path, run_id: str) -> None:
    assert run_child(store, run_id, SLEEPS, 0.2) == child_frame.EXIT_TIME_LIMIT
    with Reader(store) as reader:
        info = reader.run(run_id)
        assert info.state is State.FAILED
        assert "time limit of 0.2 s" in info.message
        assert "the_step_that_hangs" in info.traceback
        assert len(reader.steps(run_id)) == 1  # pending when it hung, and written


def test_a_step_that_holds_pythons_lock_is_ended_too(store: Path, run_id: str) -> None:
    assert run_child(store, run_id, HOLDS_THE_LOCK, 0.2) == 1
    with Reader(store) as reader:
        assert reader.run(run_id).state is State.LOST


def test_a_cancelled_step_that_does_not_end_is_ended(store: Path, run_id: str) -> None:
    request_cancel(store, run_id)
    assert run_child(store, run_id, SLEEPS, 600.0) == child_frame.EXIT_CANCELLED
    with Reader(store) as reader:
        info = reader.run(run_id)
        assert (info.state, info.message) == (
            State.CANCELLED,
            "Cancelled in the middle of a step.",
        )


def test_a_run_that_ends_in_time_is_left_alone(store: Path, run_id: str) -> None:
    assert run_child(store, run_id, "pass", 0.2) == 0
    with Reader(store) as reader:
        assert reader.run(run_id).state is State.LOST  # nobody wrote how it ended
