"""SIGKILL at 200 random moments of writing: what was flushed is there, and the store opens.

    python benchmarks/kill_store.py [--kills 200] [--seed N]      # results/kill_store.json

Each time a child writes a watched run, a step, its histograms and an event a flush, and says after
each flush which step it was; it is killed after 0 to 250 ms. Half of the children keep 8 frames in
place of 512, so that they add up older frames in every flush. The parent then checks every step
number, every event and the sum of all histograms against what the child had said. Odd runs go to
one shared file (WAL), the others each to a file of its own in a folder, as the ranks of a training
write (journal DELETE).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from contest import setting

from ampscope.errors import StoreError
from ampscope.numerics.histogram import POS_ZERO, RAW_LEN
from ampscope.records import Event, Frame, Role, RunSpec, State, StepRecord
from ampscope.store import frame_thinning
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

OUT = Path(__file__).parent / "results" / "kill_store.json"
LONGEST_S = 0.25
MODULES = 40
ROWS = np.arange(MODULES * RAW_LEN, dtype=np.int64).reshape(MODULES, RAW_LEN)
ROWS[:, POS_ZERO + 2 :] = 0  # no NaN, no Inf: such a frame would not be added to others


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one kill."""

    flushed: int  # steps of which the child had said so
    lost: int  # of these
    opened: bool
    is_whole: bool
    integrity: str
    added: bool  # it had added up older frames


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--kills", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=random.randrange(2**31))
    given = arguments.parse_args()
    random.seed(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "ranks"
        folder.mkdir()
        found = list(kills(Path(name) / "runs.db", folder, given.kills))
    flushed = [outcome.flushed for outcome in found]
    result = {
        "setting": setting(),
        "seed": given.seed,
        "kills": len(found),
        "before_the_first_flush": flushed.count(0),
        "flushed_steps": sum(flushed),
        "different_moments": len(set(flushed)),
        "most_steps": max(flushed),
        "runs_with_added_frames": sum(outcome.added for outcome in found),
        "lost_flushed_steps": sum(outcome.lost for outcome in found),
        "stores_that_did_not_open": sum(not outcome.opened for outcome in found),
        "runs_with_wrong_content": sum(not outcome.is_whole for outcome in found),
        "integrity_checks_failed": sum(outcome.integrity != "ok" for outcome in found),
    }
    print(json.dumps(result, indent=1))
    OUT.write_text(json.dumps(result, indent=1) + "\n")


def kills(shared: Path, folder: Path, count: int) -> Iterator[Outcome]:
    """What was found of each killed child."""
    for trial in range(count):
        is_shared, is_short = trial % 2 == 1, trial % 4 < 2
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            write(shared if is_shared else folder, writing, is_short)
        os.close(writing)
        try:
            select.select([reading], [], [])  # the run is registered
            time.sleep(random.uniform(0, LONGEST_S))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        told = b""
        while part := os.read(reading, 1 << 16):
            told += part
        os.close(reading)
        path = shared if is_shared else next(iter(folder.glob(f"*-{pid}-*.db")))
        yield check(path, told[:12].decode(), (len(told) - 12) // 4)


def write(path: Path, pipe: int, is_short: bool) -> None:
    """The child: never returns."""
    if is_short:
        frame_thinning.NEWEST, frame_thinning.KEPT = 4, 8
    writer = RunWriter.create(path, RunSpec("train.py", kind="watch"))
    os.write(pipe, writer.run_id.encode())
    modules, dtypes = tuple(range(MODULES)), ("fp16",) * MODULES
    step = 0
    while True:
        writer.add_step(StepRecord(step, loss=float(step)))
        writer.add_frame(Frame(step, Role.WEIGHT, modules, dtypes, ROWS + step * (ROWS > 0)))
        writer.add_event(Event(step, "note", "step", f"Step {step}."))
        writer.flush()
        os.write(pipe, step.to_bytes(4, "big"))
        step += 1


def check(path: Path, run_id: str, flushed: int) -> Outcome:
    """Every flushed step must be there whole; at most the flush in progress is beyond."""
    try:
        reader = Reader(path)
    except StoreError:
        return Outcome(flushed, flushed, False, False, "", False)
    with reader:
        info, steps = reader.run(run_id), reader.steps(run_id)
        frames = list(reader.frames(run_id, Role.WEIGHT))
        count, totals = len(steps), reader.step_totals(run_id)
        events = reader.events(run_id)
    numbers = list(range(count))
    expected = count * ROWS + sum(numbers) * (ROWS > 0)
    is_whole = (
        info.state is State.LOST
        and count in (flushed, flushed + 1)
        and [s.step for s in steps] == numbers == [e.step for e in events]
        and info.steps_done == totals.steps == count
        and bool((sum(f.rows for f in frames) == expected).all())
    )
    present = {s.step for s in steps}
    lost = sum(step not in present for step in range(flushed))
    connection = sqlite3.connect(path)
    integrity = str(connection.execute("PRAGMA integrity_check").fetchone()[0])
    connection.close()
    added = any(f.last_step is not None for f in frames)
    return Outcome(flushed, lost, True, is_whole, integrity, added)


if __name__ == "__main__":
    main()
