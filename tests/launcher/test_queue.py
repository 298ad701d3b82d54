"""One probe at a time per device: order, places, cancel, and locks that die with their holder."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ampscope.errors import Cancelled
from ampscope.launcher.launch import follow, launch
from ampscope.records import Cadence, Machine, RunSpec, State
from ampscope.runner import __main__, device, probe
from ampscope.runner.child_frame import Watchdog, device_turn, lock_path, turn
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter, request_cancel
from ampscope.telemetry.sampler_process import Readings
from tests.helpers.child_runs import wait_until, workload_file

QUIET = Cadence(0, 0, 0)


@pytest.fixture(autouse=True)
def _locks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other probes of this user hold the real locks."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def slow(folder: Path, steps: int) -> RunSpec:
    """0.1 s a step."""
    name = workload_file(folder, "slow", "time.sleep(0.1)")
    return RunSpec(name, precision="fp32", steps=steps, cadence=QUIET)


def test_probes_run_one_after_the_other_and_say_their_place(tmp_path: Path) -> None:
    store, other_store = tmp_path / "runs.db", tmp_path / "other.db"
    first = launch(slow(tmp_path, 6_000), store)  # until it is cancelled
    wait_until(store, first, lambda info: info.steps_done > 0)
    second = launch(slow(tmp_path, 3), store)
    third = launch(slow(tmp_path, 3), store)
    elsewhere = launch(slow(tmp_path, 3), other_store)
    ready = {second: 1, third: 2}
    for run_id, place in ready.items():
        info = wait_until(store, run_id, lambda i: i.machine is not None)
        assert (info.state, info.place) == (State.QUEUED, place)
        assert info.machine is not None
        assert info.machine.device == "cpu"
    request_cancel(store, third)
    cancelled = wait_until(store, third)
    assert cancelled.state is State.CANCELLED
    assert "before its turn came" in cancelled.message
    assert cancelled.steps_done == 0
    with Reader(store) as reader:
        assert reader.run(first).state is State.RUNNING  # all that happened while it ran
    request_cancel(store, first)
    done = [wait_until(store, i) for i in (first, second)] + [wait_until(other_store, elsewhere)]
    assert [info.state for info in done] == [State.CANCELLED, State.FINISHED, State.FINISHED]
    assert done[0].steps_done > 0
    spans = sorted((info.started or 0.0, info.ended or 0.0) for info in done)
    for (_, ended), (started, _) in itertools.pairwise(spans):
        assert started >= ended - 0.05  # the final state is written just after the lock is free


def test_follow_ends_with_the_final_state(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    seen = list(follow(store, launch(slow(tmp_path, 2), store)))
    assert seen[0].state is State.QUEUED
    assert seen[-1].state is State.FINISHED
    assert seen[-1].steps_done == 2


HOLDER = """
import sys
from ampscope.runner.child_frame import device_turn
with device_turn("cpu", lambda: True):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_holder_frees_the_device() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        tries = []

        def is_next() -> bool:
            tries.append(1)
            if len(tries) == 3:
                os.kill(holder.pid, signal.SIGKILL)
                holder.wait()
            return True

        with device_turn("cpu", is_next):
            assert len(tries) >= 3


def test_another_device_is_free_meanwhile() -> None:
    with device_turn("cuda:0", lambda: True), device_turn("cuda:1", lambda: True):
        assert lock_path("cuda:0") != lock_path("cuda:1")


@pytest.mark.parametrize(("uuid", "waits"), [("GPU-aaaa", True), ("GPU-bbbb", False)])
def test_a_gpu_has_one_lock_under_all_its_names(tmp_path: Path, uuid: str, waits: bool) -> None:
    """Which GPU "cuda:0" is depends on CUDA_VISIBLE_DEVICES; its UUID does not."""
    store = tmp_path / "runs.db"
    writer = RunWriter.create(store, RunSpec("gpt"))
    asked = iter([False, False, True])  # whether the run is to be cancelled

    with device_turn("GPU-aaaa", lambda: True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "beat", lambda: next(asked))
        machine = Machine("cuda:0", "NVIDIA H100", "cuda")
        turned = turn(writer, store, machine, Watchdog(writer, 60.0), uuid)
        with pytest.raises(Cancelled) if waits else nullcontext(), turned:
            pass
    assert next(asked, None) is (None if waits else False)
    writer.close()


def test_a_probe_on_a_gpu_waits_under_its_uuid_and_takes_nothing_of_it_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second GPU: that it becomes the current device takes memory there."""
    store = tmp_path / "runs.db"
    writer = RunWriter.create(store, RunSpec("gpt", precision="fp16"))
    done: list[tuple[str, str]] = []

    def note(what: str) -> None:
        with Reader(store) as reader:
            machine = reader.run(writer.run_id).machine
        done.append((what, "" if machine is None else machine.device))

    machine = Machine("cuda:1", "NVIDIA H100", "cuda")
    monkeypatch.setattr(device, "choose_device", lambda name: torch.device("cuda", 1))
    monkeypatch.setattr(device, "describe", lambda *args: machine)
    monkeypatch.setattr(device, "uuid_of", lambda where: "aaaa")
    monkeypatch.setattr(device, "sample_telemetry", lambda *args: Readings())
    monkeypatch.setattr(probe, "preload", lambda where: note("loads"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda where: note("takes"))
    monkeypatch.setattr(__main__, "_work", lambda *args: note("works") or "")
    with Watchdog(writer, 60.0) as watchdog:
        __main__._run(writer, RunSpec("gpt", precision="fp16"), store, watchdog)
    writer.close()
    assert done == [("loads", "cuda aaaa"), ("takes", "cuda:1"), ("works", "cuda:1")]


def test_leaving_the_queue_by_an_exception_holds_no_lock() -> None:
    def leave() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), device_turn("cpu", leave):
        pass
    started = time.monotonic()
    with device_turn("cpu", lambda: True):
        assert time.monotonic() - started < 5
