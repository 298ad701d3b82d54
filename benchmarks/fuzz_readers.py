"""Everything that reads what others made, fed with damaged input: what is let in, refused, crashes.

    python benchmarks/fuzz_readers.py [--count 10000] [--seed 1] [--reader capsule]

Readers: exports (changed as in import_mutations.py), stores and capsules (bytes changed, cut,
repeated and exchanged; in a capsule also values of its text, under a digest made anew). Query
addresses and widget states are attacked through the server: tests/app/test_attacks.py.
Each input ends in one of four ways:
- let in: everything that pages and reports read of it was read
- refused: an error of ampscope's own, in one sentence
- crashed: any other exception; the first of each place is kept
- over time: longer than its limit of LIMIT_S
Counts go to results/fuzz_readers.json, with the number of inputs of each reader.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import import_mutations

from ampscope.errors import AmpscopeError
from ampscope.records import Role
from ampscope.store import series
from ampscope.store.importing import import_file
from ampscope.store.reader import Reader
from ampscope.store.writer import delete_run

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "fuzz_readers.json"
LIMIT_S = 20.0
SHOWN = 12
LET_IN, REFUSED, CRASHED, OVER_TIME = "let in", "refused", "crashed", "over time"
Trial = Callable[[random.Random], None]


class OverTime(BaseException):
    """An input took longer than its limit."""


def main() -> None:
    """Run the readers that are asked for, and keep what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000, help="Inputs of each reader.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reader", choices=READERS, action="append")
    parser.add_argument("--seconds", type=float, default=1e9, help="At most, for each reader.")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    found: dict[str, object] = {"seed": asked.seed, "limit_s": LIMIT_S}
    for name in asked.reader or READERS:
        with tempfile.TemporaryDirectory() as folder:
            trial = READERS[name](Path(folder))
            found[name] = counted(trial, asked.count, f"{name} {asked.seed}", asked.seconds)
        print(name, json.dumps(found[name], indent=2), flush=True)
    asked.out.write_text(json.dumps(found, indent=2) + "\n")


def counted(trial: Trial, count: int, seed: str, seconds: float) -> dict[str, object]:
    """How the inputs ended."""
    chance, started = random.Random(seed), time.monotonic()
    ends: Counter[str] = Counter(dict.fromkeys((LET_IN, REFUSED, CRASHED, OVER_TIME), 0))
    crashes: dict[str, str] = {}
    longest = 0.0
    for number in range(count):
        if time.monotonic() - started > seconds:
            break
        begun = time.monotonic()
        try:
            with bounded():
                trial(chance)
            ends[LET_IN] += 1
        except AmpscopeError as error:
            if "\n" in str(error) or not str(error).isprintable():
                crashes.setdefault("not one sentence", f"{number}: {str(error)[:500]!r}")
                ends[CRASHED] += 1
            else:
                ends[REFUSED] += 1
        except OverTime:
            ends[OVER_TIME] += 1
            crashes.setdefault(OVER_TIME, f"{number}")
        except Exception as error:
            ends[CRASHED] += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            key = f"{type(error).__name__} {Path(place.filename).name}:{place.lineno}"
            crashes.setdefault(key, f"{number}: {traceback.format_exc(limit=-5)}")
        longest = max(longest, time.monotonic() - begun)
    examples = dict(list(crashes.items())[:SHOWN])
    return {
        "inputs": sum(ends.values()),
        **ends,
        "longest_s": round(longest, 2),
        "seconds": round(time.monotonic() - started, 1),
        "examples": examples,
    }


@contextmanager
def bounded() -> Iterator[None]:
    """Raises OverTime after LIMIT_S."""

    def over(number: int, frame: FrameType | None) -> None:
        raise OverTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def changed(chance: random.Random, content: bytes) -> bytes:
    """Bytes of ``content`` changed, left out, repeated or exchanged in one to four places."""
    made = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(max(1, len(made)))
        size = chance.choice((1, 1, 2, 4, 16, 512))
        kind = chance.randrange(6)
        if kind == 0:
            made[at : at + size] = chance.randbytes(len(made[at : at + size]))
        elif kind == 1:
            made[at : at + size] = bytes([chance.choice((0, 0x7F, 0x80, 0xFF))]) * size
        elif kind == 2:
            del made[at : at + size]
        elif kind == 3:
            made[at:at] = made[at : at + size]
        elif kind == 4 and chance.random() < 0.2:
            del made[at:]
        else:
            other = chance.randrange(max(1, len(made)))
            made[at : at + size] = made[other : other + size]
    return bytes(made)


# --- readers


def exports(folder: Path) -> Trial:
    """Imports, and all that is read of what they let in."""
    good = list(import_mutations.made_up(folder).values())
    store, path = folder / "into.db", folder / "changed.json"

    def trial(chance: random.Random) -> None:
        path.write_bytes(import_mutations.mutations.mutate(chance, chance.choice(good))[0])
        ids = [run.run_id for run in import_file(path, store)]
        try:
            import_mutations.read_all(store, ids)
        finally:
            for run_id in ids:
                delete_run(store, run_id)

    return trial


def stores(folder: Path) -> Trial:
    """The file of a store, opened and read as the pages read it."""
    import_mutations.made_up(folder)
    good = [path.read_bytes() for path in sorted(folder.glob("*.db"))]
    path = folder / "changed.sqlite"

    def trial(chance: random.Random) -> None:
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        path.write_bytes(changed(chance, chance.choice(good)))
        with Reader(path) as reader:
            for info in reader.runs():
                _read(reader, info.id)

    return trial


def _read(reader: Reader, run_id: str) -> None:
    reader.overview(run_id, 20)
    reader.step_totals(run_id)
    for step in reader.steps(run_id)[:3]:
        if step.op_set is not None:
            reader.ops(run_id, step.op_set)
    for role in Role:
        for number in reader.frame_steps(run_id, role)[:3]:
            reader.frame(run_id, role, number)
    for module in reader.modules(run_id)[:2]:
        series.module_series(reader, run_id, Role.WEIGHT_GRAD, module.index)
    for read in (reader.events, reader.shadows, reader.observations, reader.results):
        read(run_id)
    reader.samples(run_id)
    reader.nonfinite(run_id)


def capsules(folder: Path) -> Trial:
    """A capsule: its bytes, or a value of its text under a digest that was computed anew."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from ampscope.watcher import capsule as capsule_file
    from tests.helpers import overflowing as made

    run, _, _ = made.overflow(folder / "runs.db")
    run.close()
    good, path = run.capsules[0].read_bytes(), folder / "changed.safetensors"
    with safe_open(run.capsules[0], framework="pt") as file:
        text = json.loads(file.metadata()["ampscope"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    del text["digest"]

    def trial(chance: random.Random) -> None:
        if chance.random() < 0.5:
            path.write_bytes(changed(chance, good))
        else:
            forged = json.loads(json.dumps(text))
            _forge(chance, forged)
            forged["digest"] = capsule_file.digest(forged, tensors)
            save_file(tensors, path, {"ampscope": json.dumps(forged)})
        capsule = capsule_file.load(path)
        assert isinstance(capsule.contents, str)

    return trial


def _forge(chance: random.Random, value: object) -> None:
    """Another value at one place of a tree."""
    while isinstance(value, dict | list) and value:
        key: Any = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
            value = inner
            continue
        value[key] = chance.choice(
            [None, True, -1, 2**70, 1e308, "", "\x1b[2J", "x" * 10_000, [], {}, [[[]]], inner]
        )
        return


READERS: dict[str, Callable[[Path], Trial]] = {
    "export": exports,
    "store": stores,
    "capsule": capsules,
}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("AMPSCOPE_TELEMETRY", "0")
    main()
