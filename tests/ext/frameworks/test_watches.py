"""What both callbacks stand on: the run in the store, and how a ``fit`` is seen to end."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ampscope.errors import BadInput, StoreError
from ampscope.ext.frameworks import watch_run
from ampscope.ext.frameworks.recorder import FrameworkRecorder, StepFacts
from ampscope.ext.frameworks.tensors import TensorBits
from ampscope.ext.frameworks.watch_run import WatchOptions, WatchRun, on_leaving
from ampscope.records import Cadence, Machine, RunInfo, RunSpec, State
from ampscope.store.reader import Reader

WAIT_S = 60.0


def machine(spec: RunSpec) -> Machine:
    return Machine(device="cpu", device_name="x", policy="native", framework=spec.framework)


def opened(store: Path | str) -> WatchRun:
    options = WatchOptions.of(store, 0, "mine")
    run = WatchRun.opened(options, options.spec("paddle"), machine)
    assert run is not None
    return run


def info(store: Path, run_id: str) -> RunInfo:
    with Reader(store) as reader:
        return reader.run(run_id)


def until(told: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not told():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def step(recorder: FrameworkRecorder) -> None:
    gradient = {"fc.weight": TensorBits.of(np.ones(3, np.float32))}
    recorder.step(StepFacts(loss=1.0, scale=8.0, skipped=False, lr=0.1, gradients=gradient))


def test_options_are_the_same_for_every_framework(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert WatchOptions.of("~/runs.db", 0, "").store == str(tmp_path / "runs.db")
    assert WatchOptions.of("folder/", 0, "").store == "folder/"  # a file of its own in there
    with pytest.raises(BadInput, match="0 for none"):
        WatchOptions.of(None, -1, "")
    assert WatchOptions.of(None, 5, "").spec("keras", "lenet").label == "lenet"
    assert WatchOptions.of(None, 5, "mine").spec("keras", "lenet").label == "mine"


def test_a_store_that_fails_ends_the_recording_and_not_the_training(tmp_path: Path) -> None:
    run = opened(tmp_path / "runs.db")
    recorder = FrameworkRecorder(Cadence(1, 0, 0), run.keep)
    flush, failures = run.writer.flush, iter([StoreError("The disk is full.")])

    def failing() -> None:
        for error in failures:
            raise error
        flush()

    run.writer.flush = failing  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="records no more of this training: The disk is full"):
        step(recorder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            step(recorder)
    assert not recorder.wants_tensors
    found = info(tmp_path / "runs.db", run.run_id)
    assert (found.state, found.message) == (
        State.FAILED, "The recording ended early: The disk is full."
    )  # fmt: skip


def test_a_store_that_cannot_be_made_is_said_and_the_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = WatchOptions.of(tmp_path / "file" / "runs.db", 0, "")
    with pytest.warns(UserWarning, match="does not record this training"):
        assert WatchRun.opened(options, options.spec("keras"), machine) is None


def test_a_run_without_steps_is_alive(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(watch_run, "HEARTBEAT_EVERY_S", 0.01)
    run, store = opened(tmp_path / "runs.db"), tmp_path / "runs.db"
    first = info(store, run.run_id).heartbeat
    until(lambda: info(store, run.run_id).heartbeat > first)
    run.close(State.FINISHED)
    assert info(store, run.run_id).state is State.FINISHED


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed there")
def test_nothing_stays_open_and_no_memory_grows(tmp_path: Path) -> None:
    run = opened(tmp_path / "runs.db")
    recorder = FrameworkRecorder(Cadence(0, 0, 0), run.keep)
    run._now = lambda: float(recorder.steps)  # type: ignore[method-assign]  # a second a step
    for _ in range(300):
        step(recorder)
    kept = recorder.optimizer_steps, recorder.calls, recorder.gradients, recorder.scans
    assert max(len(records) for records in kept) < 10
    run.take(recorder)
    run.close(State.FINISHED)
    open_files = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if f.is_symlink()]
    assert not [name for name in open_files if name.startswith(str(tmp_path))]
    with Reader(tmp_path / "runs.db") as reader:
        assert [s.step for s in reader.steps(run.run_id)] == list(range(300))


def test_an_end_in_the_middle_of_a_write_is_written_after_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(watch_run, "LONGEST_END_S", 0.01)
    run, store = opened(tmp_path / "runs.db"), tmp_path / "runs.db"
    with run.writer._lock:  # the garbage collector may end a fit at any line
        run.left(None)
    until(lambda: info(store, run.run_id).state is State.FAILED)
    assert "outside the training steps" in info(store, run.run_id).message


class Callbacks:
    """As frameworks call each callback: from a method of the list."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin

    def on_begin(self) -> None:
        self.begin()


def test_only_a_new_error_is_the_cause_of_an_end(monkeypatch) -> None:
    told: list[BaseException | None] = []

    def fit(meanwhile: Callable[[], None]) -> None:
        callbacks = Callbacks(lambda: stops.append(on_leaving(Callbacks, told.append)))
        callbacks.on_begin()
        meanwhile()

    stops: list[Callable[[], object]] = []
    old, new = ValueError("of an earlier cell"), KeyError("of this one")
    monkeypatch.setattr(sys, "last_value", old, raising=False)
    fit(lambda: None)
    fit(lambda: monkeypatch.setattr(sys, "last_value", new))
    try:
        raise old
    except ValueError:  # a second try in an except block
        fit(lambda: None)
    assert told == [None, new, None]
    fit(lambda: stops.pop()() and None)
    assert len(told) == 3


def test_the_error_in_hand_goes_before_the_last_that_nobody_handled(monkeypatch) -> None:
    told: list[BaseException | None] = []
    error = OSError("of this fit")
    callbacks = [Callbacks(lambda: on_leaving(Callbacks, told.append) and None)]
    callbacks[0].on_begin()
    monkeypatch.setattr(sys, "last_value", ValueError("of another thread"), raising=False)
    try:
        raise error
    except OSError:
        callbacks.clear()
    assert told == [error]
