"""`ampscope import`: exports come back whole; what is no export is refused by its place."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import ampscope
from ampscope.cli.main import main
from ampscope.diagnosis.load import load_diagnosis
from ampscope.errors import BadInput, StoreError
from ampscope.launcher.script_runs import repeatable
from ampscope.record_json import Refusal
from ampscope.records import Curve, Event, Histogram, RunSpec, State
from ampscope.store import export
from ampscope.store.importing import import_file, runs, values
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from tests.helpers import made_comparisons, script_stores, stores, telemetry_samples, watched_stores

ROOT = Path(__file__).resolve().parents[2]
Document = dict[str, Any]


def exported(store: Path, out: Path) -> Document:
    """Every run of a store, oldest last, as JSON."""
    with Reader(store) as reader:
        export.to_json(reader, reader.runs(), out)
    document: Document = json.loads(out.read_text())
    return document


def tables(document: Document) -> list[Document]:
    """Without the rows of the runs, whose ids and marks are meant to differ."""
    bodies = document.get("runs") or [document]
    return [{k: v for k, v in body.items() if k not in ("run", "schema")} for body in bodies]


def watched(store: Path) -> None:
    writer = watched_stores.begun(store, watched_stores.bad(12, 8))
    writer.add_event(Event(8, "alarm", "scale_collapse", "The scale fell.", value=float("nan")))
    for step in (0, 4):
        writer.add_frame(watched_stores.frame(step))
    writer.add_samples(telemetry_samples.gpu(1.0))
    watched_stores.ended(writer)


MAKERS: dict[str, Callable[[Path], object]] = {
    "diagnosis": script_stores.overflow,
    "innocent": script_stores.innocent,
    "probe": stores.finished,
    "failed": stores.failed,
    "hostile": stores.hostile,
    "watched": watched,
    "compare": lambda s: made_comparisons.stored(s, "compare", made_comparisons.compared()),
    "batch": lambda s: made_comparisons.stored(s, "batch", made_comparisons.searched()),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_round_trip_keeps_every_table(tmp_path: Path, kind: str) -> None:
    MAKERS[kind](tmp_path / "a.db")
    first = exported(tmp_path / "a.db", tmp_path / "a.json")
    import_file(tmp_path / "a.json", tmp_path / "b.db")
    second = exported(tmp_path / "b.db", tmp_path / "b.json")
    assert any(rows for body in tables(first) for rows in body.values())
    assert tables(second) == tables(first)


def test_an_imported_diagnosis_is_judged_from_its_evidence(tmp_path: Path) -> None:
    head = script_stores.overflow(tmp_path / "a.db")
    exported(tmp_path / "a.db", tmp_path / "a.json")
    imported = {run.was: run.run_id for run in import_file(tmp_path / "a.json", tmp_path / "b.db")}
    with Reader(tmp_path / "a.db") as ours, Reader(tmp_path / "b.db") as theirs:
        first, second = load_diagnosis(ours, head), load_diagnosis(theirs, imported[head])
    assert second.diagnosis.findings == first.diagnosis.findings
    assert [t.cured for t in second.trials] == [t.cured for t in first.trials] == [True]
    assert set(second.runs) == {"as_is", "fp32", "bf16", f"fp32_modules:{script_stores.MODULE}"}


def test_what_comes_in_is_marked_and_nobodys(tmp_path: Path) -> None:
    store = tmp_path / "a.db"
    old = stores.running(store)  # exported while it runs
    exported(store, tmp_path / "a.json")
    (run,) = import_file(tmp_path / "a.json", store)
    assert run.was == old != run.run_id
    with Reader(store) as reader:
        info = reader.run(run.run_id)
        assert len(reader.runs()) == 2
        assert reader.run(old).state is State.RUNNING
    assert info.state is State.LOST
    assert info.pid is None
    assert info.message.startswith(
        "It was still running when it was exported. Imported from a.json"
    )
    assert info.spec.imported.startswith("a.json on 20")


def test_a_strangers_runs_join_no_diagnosis_and_are_not_run(tmp_path: Path) -> None:
    store = tmp_path / "a.db"
    spec = replace(script_stores.SPEC, workload=str(tmp_path / "train.py"), group="g1")
    (tmp_path / "train.py").write_text("raise SystemExit")
    head = script_stores.overflow(store, spec)
    exported(store, tmp_path / "a.json")
    imported = import_file(tmp_path / "a.json", store)
    with Reader(store) as reader:
        assert len(reader.group("g1")) == 4
        assert repeatable(reader.run(head)).workload == str(tmp_path / "train.py")
        info = reader.run(imported[0].run_id)
        assert len(reader.group(info.spec.group)) == 4
        with pytest.raises(BadInput, match="imported"):
            repeatable(info)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """One probe's export."""
    folder = tmp_path_factory.mktemp("good")
    stores.finished(folder / "a.db", replace(stores.SPEC, steps=6), ("", "embed", "block.0"))
    return exported(folder / "a.db", folder / "a.json")


def _set(*path: str | int, to: object) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        holder: Any = document
        for name in path[:-1]:
            holder = holder[name]
        holder[path[-1]] = to

    return change


def _append(table: str, place: int) -> Callable[[Document], None]:
    return lambda document: document[table].append(document[table][place])


def _without(*path: str | int) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        holder: Any = document
        for name in path[:-1]:
            holder = holder[name]
        del holder[path[-1]]

    return change


REFUSED = [
    (_set("schema", to=9), "it has schema 9; this ampscope reads 2."),
    (_set("schema", to=1), "it has schema 1; this ampscope reads 2. Export it again"),
    (_set("schema", to=True), "it has schema True"),
    (_without("schema"), "it has no schema"),
    (_without("step"), "step is missing"),
    (_set("extra", to=[]), "extra: an export has no such table"),
    (_set("step", to={}), "step: a list was expected, not an object"),
    (_set("step", 3, to=7), "step[3]: an object was expected, not a number"),
    (_set("step", 3, "loss", to="low"), "step[3].loss: a number was expected, not a text"),
    (_set("step", 3, "loss", to=True), "step[3].loss: a number was expected, not true or false"),
    (_set("step", 3, "skipped", to=1), "step[3].skipped: true or false was expected"),
    (_set("step", 3, "step", to=2.0), "step[3].step: a whole number was expected"),
    (_set("step", 3, "step", to=-1), "step[3].step: -1 is not between 0 and"),
    (_set("step", 3, "step", to=10**18), "step[3].step: 1,000,000,000,000,000,000 is not between"),
    (_set("step", 3, "speed", to=1), "step[3].speed: a StepRecord has no such field"),
    (_set("step", 3, "ended_at", to="nan"), "step[3].ended_at: nan cannot stand here"),
    (_set("step", 3, "ended_at", to=1e12), "step[3].ended_at: "),
    (_set("step", 3, "op_set", to=77), "step[3].op_set: there is no op_set 77"),
    (_set("step", 3, "scale", to=-2.0), "step[3].scale: "),
    (_set("step", 3, "scale", to="-inf"), "step[3].scale: -inf cannot stand here"),
    (_set("step", 3, "step_time_s", to="inf"), "step[3].step_time_s: inf cannot stand here"),
    (_set("histogram", 1, "scale", to="nan"), "histogram[1].scale: nan cannot stand here"),
    (_set("histogram", 1, "scale", to=-1.0), "histogram[1].scale: "),
    (_append("step", 2), "step[6]: step[2] has the same step"),
    (_append("module", 1), "module[3]: module[1] has the same module"),
    (_set("op", 0, "module", to=9), "op[0].module: there is no module 9"),
    (_set("op", 0, "phase", to="sideways"), "op[0].phase: 'sideways' is none of forward"),
    (_set("histogram", 1, "module", to=9), "histogram[1].module: there is no module 9"),
    (_set("histogram", 1, "role", to="x"), "histogram[1].role: 'x' is none of activation"),
    (_set("histogram", 1, "counts", "999", to=1), "histogram[1].counts.'999': it is no bin"),
    (_set("histogram", 1, "counts", "3", to=2**60), "histogram[1].counts.'3': "),
    (_append("histogram", 0), "has the same step, role, module and dtype"),
    (_set("histogram", 1, "dtype", to="fp7"), "histogram[1].dtype: it is none of ?, fp64"),
    (_set("histogram", 1, "scale", to=3.0), "its scale or last_step differ from those of"),
    (_set("run", "id", to="../../etc"), "run.id: '../../etc' is not 12 hexadecimal digits"),
    (_set("run", "state", to="done"), "run.state: 'done' is none of queued, running"),
    (_set("run", "spec", "kind", to="x"), "run.spec.kind: 'x' is none of probe"),
    (_set("run", "created", to=-1), "run.created: -1 is not between"),
    (_set("run", "spec", "world", to=10**9), "run.spec.world: 1,000,000,000 is not between"),
    (_set("run", "spec", "args", to=["a", 1]), "run.spec.args[1]: a text was expected"),
    (_set("run", "message", to="x\ud800"), "run.message: '\\ud800' is half a character"),
    (_set("run", "message", to="x" * 200_000), "run.message: a text of 200,000 characters"),
    (_set("observation", to=[{"record": "Os"}]), "observation[0].record: it is none of Call"),
    (_set("result", to=[{"record": "Rate"}]), "result[0]: "),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_a_refusal_names_the_place(
    tmp_path: Path, good: Document, change: Callable[[Document], None], said: str
) -> None:
    document = json.loads(json.dumps(good))
    change(document)
    (tmp_path / "in.json").write_text(json.dumps(document))
    with pytest.raises(BadInput) as refusal:
        import_file(tmp_path / "in.json", tmp_path / "b.db")
    assert str(refusal.value).startswith("in.json was not imported: ")
    assert said in str(refusal.value)
    assert ".." not in str(refusal.value).removesuffix("...").replace("...", "").replace("../", "")
    assert not (tmp_path / "b.db").exists()


def test_lists_of_a_result_belong_together(tmp_path: Path) -> None:
    results = [
        Curve("loss", "fp32", (0.0, 1.0), (3.0, 2.0)),
        Histogram("w", "a", "fp16", (0,) * 284),
    ]
    made_comparisons.stored(tmp_path / "a.db", "lesson", results)
    document = exported(tmp_path / "a.db", tmp_path / "a.json")
    assert len(document["result"][1]["row"]) == 284
    for change, said in (
        (_without("result", 0, "x", 1), "result[0].y: 2 values were given for 1 of x"),
        (_without("result", 1, "row", 9), "result[1].row: 283 counts were given"),
    ):
        changed = json.loads(json.dumps(document))
        change(changed)
        (tmp_path / "in.json").write_text(json.dumps(changed))
        with pytest.raises(BadInput) as refusal:
            import_file(tmp_path / "in.json", tmp_path / "b.db")
        assert said in str(refusal.value)


BYTES = [
    (b"", "it is not JSON at line 1, column 1"),
    (b'{"schema":2,', "it is not JSON at line 1"),
    (b"\xff\xfe{\x00", "byte 0 is not UTF-8"),
    (b'\xef\xbb\xbf{"schema":2}', "it is not JSON"),
    (b"[1,2]", "an object was expected, not a list"),
    (b'{"schema":2,"schema":2}', "the key 'schema' stands in it twice"),
    (b'{"schema":2,"run":{"id":"a","id":"b"}}', "step is missing"),
    (b'{"schema":NaN}', "it has schema None"),
    (b'{"schema":2,"runs":[]}', "runs: there is no run in it"),
    (b'{"schema":2,"runs":[{}],"x":1}', "x: a file of several runs has no such part"),
    (b'{"schema":' + b"[" * 200_000, "nested too deep"),
    (b'{"schema":' + b"9" * 10_000 + b"}", "it has schema None"),
    (b"\x00" * 100, "it is not JSON"),
]


@pytest.mark.parametrize(("content", "said"), BYTES, ids=range(len(BYTES)))
def test_a_refusal_of_bytes(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "in.json").write_bytes(content)
    with pytest.raises(BadInput) as refusal:
        import_file(tmp_path / "in.json", tmp_path / "b.db")
    assert said in str(refusal.value)


def test_numbers_that_json_allows_and_an_export_never_holds(tmp_path: Path, good: Document) -> None:
    text = json.dumps(good)
    for raw, said in (
        ("NaN", "step[0].loss: NaN is not JSON; an export writes it as a text"),
        ("1e999", "step[0].loss: '1e999' is too large"),
        ("9" * 30, "step[0].loss: a number of 30 digits is too large"),
        ('{"a":1,"a":2}', "step[0].loss: the key 'a' stands in it twice"),
    ):
        changed = text.replace('"loss": ', f'"loss": {raw}, "was": ', 1)
        (tmp_path / "in.json").write_text(changed)
        with pytest.raises(BadInput) as refusal:
            import_file(tmp_path / "in.json", tmp_path / "b.db")
        assert said in str(refusal.value)


def test_what_is_no_file_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="is no ordinary file"):
        import_file(tmp_path, tmp_path / "b.db")
    with pytest.raises(BadInput, match="does not exist"):
        import_file(tmp_path / "none.json", tmp_path / "b.db")
    monkeypatch.setattr(values, "MAX_BYTES", 2**20)
    (tmp_path / "in.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(BadInput, match=r"has 1\.0 MiB, and 1 are read at most"):
        import_file(tmp_path / "in.json", tmp_path / "b.db")


def test_a_store_that_cannot_be_written_takes_nothing(tmp_path: Path, good: Document) -> None:
    (tmp_path / "in.json").write_text(json.dumps(good))
    (tmp_path / "b.db").write_text(
        "not SQLite, and longer than its header of one hundred bytes" * 3
    )
    with pytest.raises(StoreError, match="not an ampscope store"):
        import_file(tmp_path / "in.json", tmp_path / "b.db")


def test_malformed_files_are_refused_or_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 of the 10,000 of benchmarks/import_mutations.py, with another seed."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT)
    import import_mutations

    found = import_mutations.trials(import_mutations.made_up(tmp_path), 400, 20261121, tmp_path)
    assert found["crash_examples"] == []
    assert found["refused"] + found["imported"] == 400  # type: ignore[operator]  # both are counts
    assert found["refused"] > 250  # type: ignore[operator]  # mutations that change something
    assert found["imported"] > 20  # type: ignore[operator]  # and some that still mean something


def test_the_kept_figures_are_of_ten_thousand_files() -> None:
    kept = json.loads((ROOT / "benchmarks/results/import_mutations.json").read_text())
    assert kept["files"] == kept["refused"] + kept["imported"] == 10_000
    assert kept["crashes"] == 0


def test_the_commands(tmp_path: Path) -> None:
    head = script_stores.overflow(tmp_path / "a.db")
    out, runner = tmp_path / "a.json", CliRunner()
    store = ["--store", str(tmp_path / "a.db")]
    asked = ["runs", "export", head, "--together", "--out", str(out), *store]
    assert runner.invoke(main, asked).exit_code == 0
    done = runner.invoke(main, ["import", str(out), "--store", str(tmp_path / "b.db")])
    assert done.exit_code == 0
    assert done.output.count("Imported ") == 4
    out.write_text("{}")
    done = runner.invoke(main, ["import", str(out), "--store", str(tmp_path / "b.db")])
    assert done.exit_code == 2
    assert "it has no schema" in done.output


def test_an_exported_file_is_read_like_a_store(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "a.db", RunSpec("gpt")).close()
    exported(tmp_path / "a.db", tmp_path / "a.json")
    for source in (tmp_path / "a.db", str(tmp_path / "a.json")):
        with ampscope.open_store(source) as reader:
            assert [run.spec.workload for run in reader.runs()] == ["gpt"]
    with pytest.raises(StoreError, match="no store"):
        ampscope.open_store(tmp_path / "none.db")


def test_a_full_disk_is_no_missing_store(
    tmp_path: Path, good: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.json").write_text(json.dumps(good))

    def full(*_: object, **__: object) -> object:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkdtemp", full)
        with pytest.raises(BadInput, match="No space left on device"):
            ampscope.open_store(tmp_path / "in.json")
    monkeypatch.setattr(runs, "import_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        ampscope.open_store(tmp_path / "in.json")


def test_a_file_that_cannot_be_read_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "temporary"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    (tmp_path / "in.json").write_text("{}")
    # A folder that is left to the collector warns ("Implicitly cleaning up"), and the warning is an
    # error here; the exception, whose frames would keep it alive, is gone before the look.
    with pytest.raises(BadInput):
        ampscope.open_store(tmp_path / "in.json")
    assert list(folders.iterdir()) == []
    gc.collect()


def test_many_runs_in_a_file_are_compared_with_a_set(
    good: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8,000 took 2.1 s where each was compared with all before; counted here, not timed."""
    looked: list[str] = []

    class Id(str):
        def __eq__(self, other: object) -> bool:
            looked.append(str(other))
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    def run(body: object) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(id=Id(body)))

    with monkeypatch.context() as patched:
        patched.setattr(runs, "_run", run)
        found = runs.checked({"schema": good["schema"], "runs": [f"{n:012x}" for n in range(1000)]})
    assert len(found) == 1000
    assert len(looked) < 100  # hashes that meet by chance; all pairs would be 499,500
    body = {name: part for name, part in good.items() if name != "schema"}
    with pytest.raises(Refusal, match="another run of the file has this id") as refused:
        runs.checked({"schema": good["schema"], "runs": [json.loads(json.dumps(body)), body]})
    assert refused.value.place == "runs[1].run.id"
