"""Malformed import files: every one is refused in a sentence or imported, and nothing crashes.

    python benchmarks/import_mutations.py [--files 10000]      # results/import_mutations.json

Good files are exports of made-up runs of every kind (a diagnosis of four runs, a probe, a watched
training, a comparison, a batch search, matmuls), or of the runs of a real store (--store FILE).
Each is changed (mutations.py) and imported into one store.
- refused: one sentence, and the files of the store are as they were, to the byte
- imported: then everything that the pages and reports read of it is read: all calls of the reader,
  an export, the report as HTML, Markdown and notebook. A failure there is a crash too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mutations

from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import (
    MEASUREMENT_KINDS,
    Call,
    Curve,
    Event,
    Histogram,
    NonFiniteCounts,
    Reading,
    Role,
    UnderflowCounts,
)
from ampscope.render.html import to_html
from ampscope.render.markdown import to_markdown, to_notebook
from ampscope.store import export, series
from ampscope.store.importing import import_file
from ampscope.store.importing.values import Refusal
from ampscope.store.reader import Reader
from ampscope.store.writer import delete_run
from ampscope.story.build import document, of_reports

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' made-up runs

from tests.helpers import (  # noqa: E402  # noqa: E402  - need the path set above
    core_results,
    made_comparisons,
    made_rates,
    script_stores,
    stores,
    telemetry_samples,
    watched_stores,
)

OUT = ROOT / "benchmarks" / "results" / "import_mutations.json"
SHOWN = 12  # refusals and crashes that are kept as examples


def main() -> None:
    """Run all, and keep what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", type=Path, help="Export the runs of this store instead.")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        good = of_store(asked.store) if asked.store else made_up(Path(folder))
        found = trials(good, asked.files, asked.seed, Path(folder))
    found["good_files"] = {name: len(content) for name, content in good.items()}
    found["seconds"] = round(time.perf_counter() - started, 1)
    asked.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


def trials(good: dict[str, bytes], count: int, seed: int, folder: Path) -> dict[str, object]:
    """Change, import, read; counts of what came of it."""
    chance = random.Random(seed)
    store, path = folder / "into.db", folder / "changed.json"
    for name, content in good.items():  # the good ones themselves are good
        path.write_bytes(content)
        read_all(store, [run.run_id for run in import_file(path, store)])
        print(f"{name}: {len(content):,} bytes")
    sorts, refusals, imported = Counter[str](), Counter[str](), Counter[str]()
    crashes: list[str] = []
    examples: dict[str, str] = {}
    for number in range(count):
        changed, sort = mutations.mutate(chance, good[chance.choice(list(good))])
        sorts[sort.partition(",")[0]] += 1
        path.write_bytes(changed)
        before = _state(store)
        try:
            ids = [run.run_id for run in import_file(path, store)]
        except Refusal as refusal:
            refusals[refusal.sort] += 1
            examples.setdefault(f"{refusal.sort}: {sort}", str(refusal)[:300])
            crashes += _wrong_refusal(refusal, before == _state(store), number, sort)
        except Exception:
            crashes.append(f"{number} {sort}, import:\n{traceback.format_exc(limit=-3)}")
        else:
            imported[sort.partition(",")[0]] += 1
            crashes += _read(store, ids, number, sort)
    return {
        "files": count,
        "seed": seed,
        "refused": sum(refusals.values()),
        "imported": sum(imported.values()),
        "crashes": len(crashes),
        "refused_by_kind": dict(refusals.most_common()),
        "imported_by_change": dict(imported.most_common()),
        "changes": dict(sorts.most_common()),
        "crash_examples": crashes[:SHOWN],
        "refusal_examples": dict(sorted(examples.items())[:: max(1, len(examples) // SHOWN)]),
    }


def read_all(store: Path, ids: list[str]) -> None:
    """Everything that pages and reports read of runs."""
    with Reader(store) as reader:
        reader.runs()
        for run_id in ids:
            _read_run(reader, run_id)
        exported = store.with_suffix(".again.json")
        export.to_json(reader, [reader.run(run_id) for run_id in ids], exported)
        made = document(reader, ids)
        to_html(made)
        to_markdown(made)
        to_notebook(made, of_reports(reader, ids), store)


def _read_run(reader: Reader, run_id: str) -> None:
    info = reader.run(run_id)
    assert not info.state.is_active
    assert info.pid is None
    reader.group(info.spec.group)
    steps = reader.steps(run_id)
    reader.overview(run_id, 20)
    reader.step_totals(run_id)
    modules = reader.modules(run_id)
    for number in {s.op_set for s in steps if s.op_set is not None}:
        reader.ops(run_id, number)
    for role in Role:
        for step in reader.frame_steps(run_id, role):
            reader.frame(run_id, role, step)
        for module in modules[:3]:
            series.module_series(reader, run_id, role, module.index)
    series.first_nonfinite(reader, run_id)
    series.last_step(reader, run_id)
    series.current_runs(reader, 60.0)
    for read in (reader.events, reader.shadows, reader.observations, reader.results):
        read(run_id)
    reader.samples(run_id)
    reader.samples(run_id, 50)
    reader.nonfinite(run_id)


def _read(store: Path, ids: list[str], number: int, sort: str) -> list[str]:
    try:
        read_all(store, ids)
    except Exception:
        return [f"{number} {sort}, reading:\n{traceback.format_exc(limit=-4)}"]
    finally:
        for run_id in ids:
            delete_run(store, run_id)
    return []


def _wrong_refusal(refusal: Refusal, unchanged: bool, number: int, sort: str) -> list[str]:
    """A refusal must be one short line of plain text, and leave the store alone."""
    text = str(refusal)
    if not unchanged:
        return [f"{number} {sort}: refused, and the store changed"]
    if not (text.isascii() and text.isprintable() and len(text) < 600):
        return [f"{number} {sort}: {text!r}"]
    return []


def _state(store: Path) -> tuple[bytes, ...]:
    files = [store, Path(f"{store}-wal")]
    return tuple(f"{f.stat().st_mtime_ns} {f.stat().st_size}".encode() for f in files if f.exists())


def of_store(store: Path) -> dict[str, bytes]:
    """Exports of a store's diagnoses and single runs."""
    good: dict[str, bytes] = {}
    out = Path(tempfile.mkdtemp()) / "good.json"
    with Reader(store) as reader:
        for info in reader.runs(10_000):
            together = reader.group(info.spec.group) or [info]
            if together[0].id in good:
                continue
            export.to_json(reader, together, out)
            good[together[0].id] = out.read_bytes()
    out.unlink()
    out.parent.rmdir()
    return good


def made_up(folder: Path) -> dict[str, bytes]:
    """Exports of runs of every kind, small enough that a change often hits what matters."""
    good: dict[str, bytes] = {}
    for name, make in _MAKERS.items():
        store = folder / f"{name}.db"
        make(store)
        with Reader(store) as reader:
            export.to_json(reader, reader.runs(), folder / "good.json")
        good[name] = (folder / "good.json").read_bytes()
    assert {*MEASUREMENT_KINDS, "probe", "watch", "diagnosis"} == set(good)
    return good


def _watch(store: Path) -> None:
    writer = watched_stores.begun(store, watched_stores.bad(12, 8))
    writer.add_event(Event(8, "alarm", "scale_collapse", "The scale fell.", value=1.0))
    writer.add_frame(watched_stores.frame(4))
    writer.add_samples(telemetry_samples.gpu(1.0))
    watched_stores.ended(writer)


def _probe(store: Path) -> None:
    paths = ("", "embed", "block", "block.0")
    stores.finished(store, replace(stores.SPEC, steps=6), paths)


LESSON = [
    Reading("lost share", "fp16", 0.25),
    Curve("loss", "fp32", (0.0, 1.0, 2.0), (3.0, 2.0, float("nan"))),
    Curve("error", "bf16", (0.5, 1.5), (1e-3, 1e-2)),
    Histogram("grad_output", "fp16", "fp16", tuple(range(RAW_LEN))),
    UnderflowCounts("fp16", 1024.0, 100, 1, 2, 3, 4),
    NonFiniteCounts("fp16", 0, "softmax", "forward", 10, 0, 1, 2.5),
    Call("mm", "forward", "fp16,fp16", "fp16", 3),
]
_MAKERS = {
    "diagnosis": script_stores.overflow,
    "probe": _probe,
    "watch": _watch,
    "compare": lambda s: made_comparisons.stored(s, "compare", made_comparisons.compared()),
    "batch": lambda s: made_comparisons.stored(s, "batch", made_comparisons.searched()),
    "cores": lambda s: core_results.stored(s, [core_results.linear(1024, 96, 256, 1e-5, 4e-5)]),
    "lesson": lambda s: made_comparisons.stored(s, "lesson", LESSON),
    "bench": lambda s: made_comparisons.stored(
        s, "bench", made_rates.ceilings_of({"fp32": 1.0, "bf16": 4.0, "fp16": None})
    ),
}


if __name__ == "__main__":
    main()
