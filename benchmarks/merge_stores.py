"""How long ``ampscope runs merge`` takes for the stores that the ranks of one training wrote into a
folder. Writes results/merge_stores.json.

    python benchmarks/merge_stores.py [--stores 256] [--steps 2000] [--modules 40]

Each store holds a watched rank: all of its steps, and a histogram of each module and role every
100 steps. Their content is large_run.py's, which is harder to compress than a recorded one. One
store is written and copied, and each copy gets a run id, a group and a rank of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np
from contest import setting
from large_run import frame_of, module_records

from ampscope.record_json import dumps
from ampscope.records import Machine, Role, RunSpec, State, StepRecord
from ampscope.store import db
from ampscope.store.merging import merge, stores_in
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

OUT = Path(__file__).parent / "results" / "merge_stores.json"
EVERY = 100  # steps from one histogram to the next
GOAL_S = 60.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--stores", type=int, default=256)
    arguments.add_argument("--steps", type=int, default=2_000)
    arguments.add_argument("--modules", type=int, default=40)
    given = arguments.parse_args()
    before = setting()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, run_id = one_rank(folder / "first", given.steps, given.modules)
        shared = folder / "shared"
        shared.mkdir()
        for rank in range(given.stores):
            copy_as_rank(first, run_id, shared / f"rank{rank:03}.db", rank, given.stores)
        into = folder / "all.db"
        wall, cpu = time.perf_counter(), time.process_time()
        merged = list(merge(stores_in([shared]), into))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        with Reader(into) as reader:
            runs = len(reader.runs(given.stores + 1))
        result = {
            "setting": before,
            **vars(given),
            "runs": runs,
            "source_mib": sum(p.stat().st_size for p in shared.glob("*.db")) / 2**20,
            "merged_mib": into.stat().st_size / 2**20,
            "wall_s": wall,
            "cpu_s": cpu,
            "goal_s": GOAL_S,
            "load_average_after": setting()["load_average"],
        }
    assert runs == given.stores == len(merged)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{runs} stores: {wall:.1f} s, {cpu:.1f} s of them on a processor")


def one_rank(folder: Path, steps: int, modules: int) -> tuple[Path, str]:
    """A store with one finished watched run, and the run's id."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    store = folder / "rank.db"
    writer = RunWriter.create(store, RunSpec("train.py", kind="watch", group="ranks"))
    writer.start(Machine("cpu", "benchmark", "native"))
    writer.add_modules(module_records(modules))
    centres = rng.normal(-14, 4, (len(Role), modules))
    for step in range(steps):
        writer.add_step(
            StepRecord(step, 3.0 / (1 + step / 50), 2.0**16, step, False, 1.0, 1e-3, 0.2)
        )
        if step % EVERY == 0:
            for place, role in enumerate(Role):
                writer.add_frame(frame_of(rng, role, step, centres[place]))
    writer.finish(State.FINISHED)
    writer.close()
    with sqlite3.connect(store) as connection:  # one file, as a rank leaves it in a shared folder
        connection.execute("PRAGMA journal_mode=DELETE")
    return store, writer.run_id


def copy_as_rank(first: Path, run_id: str, store: Path, rank: int, world: int) -> None:
    """The same content under another run id, as the run of ``rank``."""
    shutil.copyfile(first, store)
    own = f"{int(run_id, 16) + rank:012x}"
    with Reader(store) as reader:
        spec = dataclasses.replace(reader.run(run_id).spec, rank=rank, world=world)
    connection = db.open_for_writing(store)
    connection.execute("PRAGMA foreign_keys=OFF")
    with db.transaction(connection):
        connection.execute("UPDATE run SET id=?, spec=?", (own, dumps(dataclasses.asdict(spec))))
        tables = [
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            if row[0] != "run" and not row[0].startswith("sqlite")
        ]
        for table in tables:
            connection.execute(f'UPDATE "{table}" SET run=?', (own,))
    connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()


if __name__ == "__main__":
    main()
