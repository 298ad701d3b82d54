"""A report's notebook: its form, and that its cells run, one after the other in one namespace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from ampscope.render.markdown import to_notebook
from ampscope.store import export
from ampscope.store.reader import Reader
from ampscope.story.build import document, of_reports
from tests.helpers import made_comparisons, script_stores, stores
from tests.helpers.child_runs import run_command
from tests.helpers.hostile_texts import HOSTILE

MAKERS: dict[str, tuple[Callable[[Path], str], int]] = {
    "diagnosis": (script_stores.overflow, 4),
    "probe": (stores.finished, 1),
    "hostile": (stores.hostile, 1),
    "compare": (lambda s: made_comparisons.stored(s, "compare", made_comparisons.compared()), 1),
}


def notebook_of(store: Path, run: str, source: Path | None = None) -> dict[str, Any]:
    with Reader(store) as reader:
        text = to_notebook(document(reader, [run]), of_reports(reader, [run]), source or store)
    made: dict[str, Any] = json.loads(text)
    return made


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The namespace after all code cells."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    return namespace


@pytest.mark.parametrize("kind", MAKERS)
def test_it_loads_the_run_from_the_store(tmp_path: Path, kind: str) -> None:
    make, count = MAKERS[kind]
    store = tmp_path / "a store's runs.db"
    made = notebook_of(store, make(store))
    nbformat.validate(made)
    found = executed(made)
    assert len(found["infos"]) == count
    if kind == "diagnosis":
        assert found["report"].diagnosis.findings[0].cause == "activation_overflow"
        assert sorted(len(table) for table in found["steps"].values()) == [12] * 4
    if kind == "compare":
        assert set(found["results"]["record"]) >= {"StepTimes", "LossCurve"}


def test_it_loads_the_run_from_an_exported_file(tmp_path: Path) -> None:
    store, out = tmp_path / "runs.db", tmp_path / "runs.json"
    head = script_stores.overflow(store)
    with Reader(store) as reader:
        export.to_json(reader, reader.runs(), out)
    found = executed(notebook_of(store, head, out))
    assert found["report"].diagnosis.findings[0].cause == "activation_overflow"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_of_a_run_is_code(tmp_path: Path, text: str) -> None:
    store = tmp_path / "runs.db"
    head = script_stores.overflow(store, op=script_stores.bad_op(text, text, text))
    code = [
        "".join(cell["source"])
        for cell in notebook_of(store, head)["cells"]
        if cell["cell_type"] == "code"
    ]
    plain = tmp_path / "plain.db"
    other = script_stores.overflow(plain)
    expected = [
        "".join(cell["source"])
        for cell in notebook_of(plain, other, store)["cells"]
        if cell["cell_type"] == "code"
    ]
    # Nothing but the ids of the runs differs from the notebook of a harmless run.
    assert code[1:] == expected[1:]
    assert [x for x in code[0].splitlines() if not x.startswith("RUNS")] == [
        x for x in expected[0].splitlines() if not x.startswith("RUNS")
    ]


@pytest.mark.parametrize(("precision", "fmt"), [("bf16", "bf16"), ("fp16", "fp16")])
def test_histograms_are_held_against_the_format_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, fmt: str
) -> None:
    store = tmp_path / "runs.db"
    executed(notebook_of(store, stores.finished(store, replace(stores.SPEC, precision=precision))))
    said = [x for x in capsys.readouterr().out.splitlines() if "would be lost" in x]
    assert said
    assert all(x.endswith(f"in {fmt}") for x in said)


@pytest.mark.parametrize("as_recorded", [False, True])
def test_the_stores_folder_is_not_handed_on(tmp_path: Path, as_recorded: bool) -> None:
    store, out = tmp_path / "runs.db", tmp_path / "out.ipynb"
    run = stores.finished(store)
    options = ["--as-recorded"] if as_recorded else []
    done = run_command("report", run, "--notebook", out, "--store", store, *options)
    assert done.returncode == 0, done.stderr
    assert (str(tmp_path) in out.read_text()) is as_recorded


def test_a_notebook_away_from_its_store_opens_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "runs.db"
    made = notebook_of(store, stores.finished(store), Path("runs.db"))
    monkeypatch.chdir("/")
    monkeypatch.setenv("AMPSCOPE_STORE", str(store))
    assert len(executed(made)["infos"]) == 1
