"""The state of a run as a reader sees it: queue, lost runs, identifiers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.errors import BadInput
from ampscope.records import Machine, Role, RunSpec, State, StepRecord
from ampscope.store import db
from ampscope.store.processes import is_alive, process_start_time
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from tests.helpers import stores

CPU = Machine("cpu", "a CPU", "rehearsal")
GPU = Machine("cuda:0", "a GPU", "cuda")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def queued(path: Path, machine: Machine | None = None) -> str:
    writer = RunWriter.create(path, RunSpec("gpt"))
    if machine is not None:
        writer.wait_for(machine)
    writer.close()
    return writer.run_id


def edit(path: Path, run_id: str, **columns: object) -> None:
    """Change the run's row behind the writer's back."""
    connection = sqlite3.connect(path)
    for name, value in columns.items():
        connection.execute(f"UPDATE run SET {name} = ? WHERE id = ?", (value, run_id))
    connection.commit()
    connection.close()


def test_places_in_the_queue_of_one_device(path: Path) -> None:
    ids = [queued(path, CPU) for _ in range(3)]
    with Reader(path) as reader:
        assert [reader.run(i).place for i in ids] == [1, 2, 3]
        assert [reader.is_next(i) for i in ids] == [True, False, False]
        edit(path, ids[0], state="running")
        assert [reader.run(i).place for i in ids] == [0, 1, 2]


def test_another_device_has_a_queue_of_its_own(path: Path) -> None:
    first_cpu, gpu, second_cpu = queued(path, CPU), queued(path, GPU), queued(path, CPU)
    with Reader(path) as reader:
        assert reader.run(first_cpu).place == 1
        assert reader.run(gpu).place == 1
        assert reader.run(second_cpu).place == 2


def test_a_run_that_is_still_starting_keeps_its_place(path: Path) -> None:
    starting, ready = queued(path), queued(path, CPU)
    with Reader(path) as reader:
        assert reader.run(starting).place == 1
        assert reader.run(ready).place == 2
        assert not reader.is_next(ready)
        edit(path, starting, pid=2**22 + 1)  # above the largest pid of Linux: it has died
        assert reader.is_next(ready)


def test_a_run_whose_process_is_gone_is_lost(path: Path) -> None:
    run_id = queued(path)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child, Reader(path) as reader:
        edit(
            path,
            run_id,
            state="running",
            pid=child.pid,
            pid_started=process_start_time(child.pid),
        )
        assert reader.run(run_id).state is State.RUNNING
        child.kill()
        child.wait()
        info = reader.run(run_id)
        assert info.state is State.LOST
        assert "without reporting an error after 0 steps" in info.message


def test_another_process_with_the_same_pid_is_not_the_writer(path: Path) -> None:
    run_id = queued(path)
    edit(path, run_id, state="running", pid_started=-1.0)
    with Reader(path) as reader:
        assert reader.run(run_id).state is State.LOST


def test_a_silent_run_is_lost_though_its_process_lives(path: Path) -> None:
    run_id = queued(path)
    edit(path, run_id, state="running", heartbeat=0.0)
    with Reader(path) as reader:
        assert reader.run(run_id).state is State.LOST


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    started = process_start_time(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped
    assert not is_alive(child.pid, started)
    child.wait()


def test_a_finished_run_stays_finished(path: Path) -> None:
    writer = RunWriter.create(path, RunSpec("gpt"))
    writer.finish(State.FINISHED)
    writer.close()
    edit(path, writer.run_id, pid=1, heartbeat=0.0)
    with Reader(path) as reader:
        assert reader.run(writer.run_id).state is State.FINISHED


def test_a_run_is_found_by_a_unique_beginning(path: Path) -> None:
    first, second = queued(path), queued(path)
    edit(path, first, id="aaaa00000001")
    edit(path, second, id="aaaa00000002")
    with Reader(path) as reader:
        assert reader.run("aaaa00000001").id == "aaaa00000001"
        for text, what in (("aaaa", "several"), ("b", "not in"), ("", "not in"), ("a%", "not in")):
            with pytest.raises(BadInput, match=what):
                reader.run(text)


def test_newest_first_and_no_more_than_asked_for(path: Path) -> None:
    ids = [queued(path) for _ in range(4)]
    with Reader(path) as reader:
        assert [info.id for info in reader.runs(3)] == ids[:0:-1]


def test_groups(path: Path) -> None:
    ids = []
    for group in ("x", "y", "x"):
        writer = RunWriter.create(path, dataclasses.replace(RunSpec("gpt"), group=group))
        writer.close()
        ids.append(writer.run_id)
    with Reader(path) as reader:
        assert [info.id for info in reader.group("x")] == [ids[0], ids[2]]
        assert reader.group("") == []


def test_the_share_of_the_instruments_leaves_the_first_step_out(path: Path) -> None:
    writer = RunWriter.create(path, RunSpec("gpt"))
    for step, (bare, instruments) in enumerate([(9.0, 50.0), (1.0, 0.5), (2.0, 0.5)]):
        writer.add_step(StepRecord(step, step_time_s=bare, overhead_s=instruments))
    writer.close()
    with Reader(path) as reader:
        assert reader.run(writer.run_id).overhead_share == pytest.approx(1.0 / 4.0)
        assert reader.run(queued(path)).overhead_share is None


def test_an_unknown_state_is_said_of_the_run(path: Path) -> None:
    run_id = queued(path)
    edit(path, run_id, state="dancing")
    with Reader(path) as reader:
        found = reader.run(run_id)
    assert found.state is State.FAILED
    assert "'dancing'" in found.message


def test_a_reader_cannot_write(path: Path) -> None:
    queued(path)
    with Reader(path) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._connection.execute("DELETE FROM run")


def test_the_shadows_of_one_step_are_those_of_all_steps_at_it(path: Path) -> None:
    run = stores.finished(path)
    with Reader(path) as reader:
        every = reader.shadows(run, Role.GRAD_OUTPUT)
        steps = {s.step for s in every}
        assert len(steps) > 1
        for step in (*steps, 10_000):
            own = [s for s in every if s.step == step]
            assert reader.shadows(run, Role.GRAD_OUTPUT, step) == own


@pytest.mark.parametrize(
    ("sql", "values", "row"),
    [
        ("SELECT ?, ?", ("a", "b"), ("a", "b")),
        ("SELECT ?1, ?2, ?1, -?3", ("a", "b", 2.5), ("a", "b", "a", -2.5)),
        ("SELECT ?, ?2 IS NULL, ?2, ?3", ("a", None, 7), ("a", 1, None, 7)),
        ("SELECT ?2, ?, ?1", ("a", "b", "c"), ("b", "c", "a")),
    ],
)
def test_numbered_placeholders_mean_what_they_mean_to_sqlite(
    sql: str, values: tuple[object, ...], row: tuple[object, ...]
) -> None:
    """Python 3.12 warns of a sequence of values for numbered ones, and 3.14 refuses it."""
    plain, given = db.in_order(sql, values)
    assert "?1" not in plain
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        assert connection.execute(plain, given).fetchone() == row
