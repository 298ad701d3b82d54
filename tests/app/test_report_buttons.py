"""The report buttons of the dashboard: on every run that has something to report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ampscope.store import export, sharing
from ampscope.store.importing import import_file
from ampscope.store.reader import Reader
from tests.helpers import (
    browser,
    made_comparisons,
    made_rates,
    script_stores,
    stores,
    watched_stores,
)
from tests.helpers.classes import Class

LABELS = ["HTML, one file", "Markdown, for an issue", "Notebook that loads the run"]


def watched(store: Path) -> str:
    return watched_stores.ended(watched_stores.begun(store, watched_stores.bad(12, 8)))


def benched(store: Path) -> str:
    return made_comparisons.stored(store, "bench", list(made_rates.ceilings_of({"fp32": 1.0})))


PAGES: dict[str, tuple[str, str, Callable[[Path], str]]] = {
    "diagnosis": ("diagnosis", "run", script_stores.overflow),
    "script on a page of runs": ("loss_scale", "run", script_stores.overflow),
    "probe": ("gradients", "run", stores.finished),
    "failed": ("loss_scale", "run", stores.failed),
    "watched": ("training", "run", watched),
    "measurement": ("hardware", "bench", benched),
}


def labels(app: object) -> list[str]:
    buttons = app.get("download_button")  # type: ignore[attr-defined]  # streamlit's AppTest
    return [b.proto.label for b in buttons if b.proto.id and b.proto.label in LABELS]


@pytest.mark.parametrize("kind", PAGES)
def test_every_run_has_its_files(
    store_path: Path, open_page: Callable[..., object], kind: str
) -> None:
    page, name, make = PAGES[kind]
    app = open_page(page, **{name: make(store_path)})
    assert not app.exception  # type: ignore[attr-defined]
    assert labels(app) == LABELS


def test_a_run_without_steps_has_none(store_path: Path, open_page: Callable[..., object]) -> None:
    app = open_page("loss_scale", run=stores.queued(store_path))
    assert labels(app) == []


def test_an_imported_diagnosis_is_looked_at_and_not_run(
    store_path: Path, open_page: Callable[..., object], tmp_path: Path
) -> None:
    other = tmp_path / "other.db"
    head = script_stores.overflow(other, fixed=False)
    with Reader(other) as reader:
        export.to_json(reader, reader.runs(), tmp_path / "a.json")
    imported = {run.was: run.run_id for run in import_file(tmp_path / "a.json", store_path)}
    app = open_page("diagnosis", run=imported[head])
    assert not app.exception  # type: ignore[attr-defined]
    said = " ".join(c.value for c in app.caption)  # type: ignore[attr-defined]
    assert "imported from a" in said.replace("\\", "")
    assert "is not run from here" in said
    assert not [b for b in app.button if "fix" in b.label.lower()]  # type: ignore[attr-defined]


def test_a_student_gets_files_of_what_is_shared_and_no_more(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Class(monkeypatch)
    head = script_stores.overflow(store_path)
    with Reader(store_path) as reader:
        runs = [run.id for run in reader.runs()]
    assert labels(room.teacher().page("diagnosis", run=head)) == LABELS
    sharing.share(store_path, runs, wanted=True)
    # The notebook names the teacher's store and reads all of it.
    assert labels(room.student().page("diagnosis", run=head)) == LABELS[:2]
    sharing.share(store_path, [run for run in runs if run != head], wanted=False)
    # The other runs are private again; a report is made of all of them.
    assert labels(room.student().page("diagnosis", run=head)) == []


@pytest.mark.browser
def test_a_click_makes_the_file(
    store_path: Path, dashboard: Callable[..., str], browser_page: object
) -> None:
    head = script_stores.overflow(store_path)
    page = browser_page
    page.goto(f"{dashboard(store_path)}/diagnosis?run={head}")  # type: ignore[attr-defined]
    browser.settle(page)  # type: ignore[arg-type]
    page.get_by_role("button", name="Report").click()  # type: ignore[attr-defined]
    with page.expect_download() as download:  # type: ignore[attr-defined]
        page.get_by_role("button", name=LABELS[0]).click()  # type: ignore[attr-defined]
    assert download.value.suggested_filename == f"ampscope-{head}.html"
    text = Path(download.value.path()).read_text()
    assert "Root cause: An activation overflowed" in text
