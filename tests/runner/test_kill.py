"""SIGKILL at any moment loses no flushed step, and the store opens."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.launcher.launch import launch
from ampscope.records import Cadence, Role, RunSpec, State
from ampscope.store.reader import Reader
from tests.helpers.child_runs import wait_until, workload_file

# One process forks fifty writers, one after the other, into one store, and kills each at a random
# moment. A writer tells through a pipe which step it has flushed.
FIFTY = """
import os, random, select, signal, sys, time
from pathlib import Path
import numpy as np
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Frame, Role, RunSpec, State, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

path, seed = Path(sys.argv[1]), int(sys.argv[2])
random.seed(seed)
ROWS = np.arange(40 * RAW_LEN, dtype=np.int64).reshape(40, RAW_LEN)


def write(pipe):
    writer = RunWriter.create(path, RunSpec("gpt"))
    os.write(pipe, writer.run_id.encode())
    step = 0
    while True:
        writer.add_step(StepRecord(step, loss=float(step)))
        writer.add_frame(Frame(step, Role.WEIGHT, tuple(range(40)), ("fp16",) * 40, ROWS + step))
        writer.flush()
        os.write(pipe, step.to_bytes(4, "big"))
        step += 1


for trial in range(50):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        write(writing)
    os.close(writing)
    select.select([reading], [], [])  # the run is registered
    time.sleep(random.uniform(0, 0.04))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    told = b""
    while part := os.read(reading, 1 << 16):
        told += part
    os.close(reading)
    run_id, numbers = told[:12].decode(), told[12:]
    flushed = len(numbers) // 4
    with Reader(path) as reader:
        info = reader.run(run_id)
        steps = reader.steps(run_id)
        assert info.state is State.LOST, info
        assert [s.step for s in steps] == list(range(len(steps)))
        assert len(steps) in (flushed, flushed + 1), (flushed, len(steps))
        assert info.steps_done == len(steps)
        frames = list(reader.frames(run_id, Role.WEIGHT))
        assert [f.step for f in frames] == [s.step for s in steps]
        assert all((f.rows == ROWS + f.step).all() for f in frames)
    print(flushed)
"""


def test_fifty_kills_at_random_moments(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    seed = random.randrange(2**31)
    done = subprocess.run(
        [sys.executable, "-c", FIFTY, str(store), str(seed)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    flushed = [int(line) for line in done.stdout.split()]
    assert len(flushed) == 50
    assert len(set(flushed)) > 5  # the moments were different ones
    connection = sqlite3.connect(store)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("SELECT count(*) FROM run").fetchone() == (50,)
    connection.close()


@pytest.mark.parametrize("after", [1, 4])
def test_a_real_probe(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    store = tmp_path / "runs.db"
    name = workload_file(tmp_path, "slow", "time.sleep(0.15)")
    run_id = launch(RunSpec(name, steps=500, cadence=Cadence(1, 1, 2)), store)
    info = wait_until(store, run_id, lambda i: i.steps_done >= after)
    assert info.pid is not None
    os.kill(info.pid, signal.SIGKILL)
    lost = wait_until(store, run_id, lambda i: not i.state.is_active)
    assert lost.state is State.LOST
    assert f"after {lost.steps_done:,} steps" in lost.message
    with Reader(store) as reader:
        steps = reader.steps(run_id)
        assert len(steps) == lost.steps_done >= info.steps_done
        for step in steps:
            for role in (Role.WEIGHT, Role.ACTIVATION, Role.GRAD_OUTPUT, Role.WEIGHT_GRAD):
                assert reader.frame(run_id, role, step.step) is not None
            assert step.op_set is not None
            assert reader.ops(run_id, step.op_set)


# Killed in the middle of a transaction whose pages SQLite has begun to write into the file itself.
HALF_WRITTEN = """
import os, signal, sys
from ampscope.records import RunSpec, StepRecord
from ampscope.store.writer import RunWriter

writer = RunWriter.create(sys.argv[1] + "/", RunSpec("train.py", kind="watch"))
writer.add_step(StepRecord(0, loss=1.0))
writer.flush()
print(writer.path, writer.run_id, flush=True)
writer._connection.execute("PRAGMA cache_size = 2")
writer._connection.execute("BEGIN IMMEDIATE")
for step in range(1, 5000):
    writer._connection.execute(
        "INSERT INTO step (run, step, loss, skipped) VALUES (?,?,0,0)", (writer.run_id, step)
    )
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_killed_in_the_middle_of_a_write_to_its_file(tmp_path: Path) -> None:
    """Its journal is hot: a read-only connection alone could not open the file."""
    done = subprocess.run(
        [sys.executable, "-c", HALF_WRITTEN, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    path, run_id = done.stdout.split()
    assert Path(f"{path}-journal").stat().st_size
    with Reader(Path(path)) as reader:
        assert [s.step for s in reader.steps(run_id)] == [0]
        assert reader.step_totals(run_id).steps == 1
