"""The sampler as a process: it writes beside the run's own writer, and never outlives the run."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ampscope.errors import StoreError
from ampscope.launcher.launch import follow, launch
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import RunSpec, Sample, State
from ampscope.store.reader import Reader
from ampscope.store.samples import SampleRows, row_of
from ampscope.store.writer import RunWriter, delete_run
from ampscope.telemetry.sampler import Sampler
from ampscope.telemetry.sampler_process import beside
from ampscope.telemetry.values import DeviceLost, SampleValues
from tests.helpers import recorded_cuda, stores

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
PATIENCE_S = 20.0  # for a process on a loaded machine


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunWriter]:
    monkeypatch.setenv("AMPSCOPE_TELEMETRY", "1")
    writer = RunWriter.create(tmp_path / "runs.db", RunSpec(workload="gpt"))
    writer.start(stores.MACHINE)
    yield writer
    writer.close()


def samples(writer: RunWriter) -> list[Sample]:
    with Reader(writer.path) as reader:
        return reader.samples(writer.run_id)


def until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def sampler_of(writer: RunWriter) -> list[int]:
    """Pids of living samplers of this run, by their command lines."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ampscope.telemetry.sampler" in words and writer.run_id.encode() in words:
            found.append(int(name))
    return found


@pytest.mark.parametrize("as_child", [True, False])
def test_readings_are_there_when_the_sampler_has_been_stopped(
    run: RunWriter, as_child: bool
) -> None:
    begun = time.time()
    with beside(run.path, run.run_id, as_child=as_child) as readings:
        until(lambda: len(samples(run)) > 8, "no transaction")
        if not as_child:
            (sampler,) = sampler_of(run)
            with pytest.raises(ChildProcessError):
                os.waitpid(sampler, os.WNOHANG)
    found = samples(run)
    assert readings.note == ""
    assert {s.device for s in found} == {"cpu"}
    assert all(begun <= s.at <= time.time() for s in found)
    gaps = sorted(b.at - a.at for a, b in itertools.pairwise(found))
    assert gaps[len(gaps) // 2] == pytest.approx(0.1, abs=0.03)
    assert found[-1].own_memory_bytes
    until(lambda: not sampler_of(run), "left behind")
    assert readings.stop() == ""  # again does nothing


def test_off_starts_nothing(run: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_TELEMETRY", "0")
    with beside(run.path, run.run_id) as readings:
        assert not sampler_of(run)
    assert (samples(run), readings.note) == ([], "")


def test_a_machine_without_nvml_gets_one_sentence_and_its_cpu(run: RunWriter) -> None:
    with beside(run.path, run.run_id) as readings:
        readings.add("cuda:0", "GPU-0000")
        until(lambda: samples(run), "no transaction")
    assert readings.note.startswith("cuda:0 could not be read beside the run: ")
    assert readings.note.count(".") == 1
    assert {s.device for s in samples(run)} == {"cpu"}


def test_a_gpu_is_read_from_when_it_is_known(
    run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its UUID, beside the CPU, which is read on without a gap."""
    recorded_cuda.in_children(tmp_path / "site", monkeypatch)
    with beside(run.path, run.run_id) as readings:
        until(lambda: samples(run), "no transaction")
        asked = time.time()
        readings.add("cuda:0", recorded_cuda.UUIDS[1])
        until(lambda: "cuda:0" in {s.device for s in samples(run)}, "not read")
    found = samples(run)
    gpu = [s for s in found if s.device == "cuda:0"]
    assert readings.note == ""
    assert all(s.at >= asked and s.power_w == 118.4 for s in gpu)
    at = sorted(s.at for s in found if s.device == "cpu")
    assert max(b - a for a, b in itertools.pairwise(at)) < 1.0


@pytest.mark.parametrize("as_child", [True, False])
def test_it_ends_with_a_process_that_is_killed(run: RunWriter, as_child: bool) -> None:
    """Its forks still hold the pipe, so that the pipe's end tells nothing."""
    code = f"""
import os, time
from pathlib import Path
from ampscope.telemetry.sampler_process import beside
readings = beside(Path({str(run.path)!r}), {run.run_id!r}, as_child={as_child})
if os.fork() == 0:
    time.sleep({PATIENCE_S})
    os._exit(0)
time.sleep({PATIENCE_S})
"""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        until(lambda: samples(run), "no transaction")
        (pid,) = sampler_of(run)
        process.kill()
        process.wait()
        until(lambda: pid not in sampler_of(run), "left behind")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("ending", ["finished", "deleted"])
def test_it_ends_with_the_run(run: RunWriter, ending: str) -> None:
    readings = beside(run.path, run.run_id)
    until(lambda: samples(run), "no transaction")
    if ending == "finished":
        run.finish(State.FINISHED)
        count = len(samples(run))
    else:
        delete_run(run.path, run.run_id)
        count = 0
    until(lambda: not [p for p in sampler_of(run) if not is_zombie(p)], "left behind")
    assert len(samples(run)) == count
    assert readings.stop() == ""


def is_zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_a_store_that_fails_is_a_sentence(run: RunWriter, tmp_path: Path) -> None:
    (tmp_path / "no store").write_text("nothing of the kind")
    readings = beside(tmp_path / "no store", run.run_id)
    until(lambda: readings._process is None or readings._process.poll() is not None, "goes on")
    assert readings.stop().startswith("The machine's readings end early: ")


class Vanishing:
    """A device that answers twice."""

    device = "cuda:0"

    def __init__(self) -> None:
        self.left = 2

    def read(self, now: float) -> SampleValues:
        if self.left == 0:
            raise DeviceLost("cuda:0 stopped answering NVML (lost).")
        self.left -= 1
        return {"power_w": 100.0}

    def close(self) -> None:
        raise OSError("gone")


def test_a_device_that_vanishes_is_a_note_and_keeps_its_readings(run: RunWriter) -> None:
    with SampleRows(run.path, run.run_id) as rows:
        sampler = Sampler(rows, [Vanishing()])
        receive, send = os.pipe()
        sampler.run(receive, os.getpid(), None)  # ends by itself: there is nothing left to read
        os.close(receive)
        os.close(send)
    assert sampler.notes == ["cuda:0 stopped answering NVML (lost)."]
    assert [s.power_w for s in samples(run)] == [100.0, 100.0]


def test_rows_of_a_run_that_has_ended_are_not_written(run: RunWriter) -> None:
    with SampleRows(run.path, run.run_id) as rows:
        assert rows.write([row_of("cpu", 1.0, {})])
        run.finish(State.CANCELLED, "x")
        assert not rows.write([row_of("cpu", 2.0, {})])
    assert [s.at for s in samples(run)] == [1.0]


def test_a_store_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x" * 5000)
    with pytest.raises(StoreError, match="not an ampscope store"):
        SampleRows(tmp_path / "text", "run")


def test_without_wal_rows_wait_for_the_disk(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "rank.db", "abc", "DELETE")
    writer._register(RunSpec(workload="", kind="watch"))
    with SampleRows(writer.path, "abc") as rows:
        assert rows.write([row_of("cpu", 1.0, {})])
        assert samples(writer) == []
    assert [s.at for s in samples(writer)] == [1.0]
    writer.close()


def test_a_probe_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_TELEMETRY", "1")
    store = tmp_path / "runs.db"
    run_id = launch(RunSpec(workload="mlp", precision="fp32", device="cpu", steps=20), store)
    *_, info = follow(store, run_id)
    assert (info.state, info.message) == (State.FINISHED, "")
    with Reader(store) as reader:
        found = reader.samples(run_id)
    assert found
    assert info.started is not None
    assert info.ended is not None
    assert info.started <= found[0].at <= found[-1].at <= info.ended


SCRIPT = """
import os, torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(10):
    layer(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
try:
    os.waitpid(-1, 0)
    print("a child that is not mine")
except ChildProcessError:
    print("alone")
"""


def test_a_script_is_read_as_it_is_and_finds_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_TELEMETRY", "1")
    script, store = tmp_path / "train.py", tmp_path / "runs.db"
    script.write_text(SCRIPT)
    spec = RunSpec(workload=str(script), kind="script", policy="native", time_limit_s=60)
    with ScriptRuns(spec, store) as runs:
        first = runs.run("as_is")
        control = runs.run("fp32", parent=first.info.id)
    assert "alone" in first.output
    with Reader(store) as reader:
        assert reader.samples(first.info.id)
        assert not reader.samples(control.info.id)
