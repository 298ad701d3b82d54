"""What a report says of a comparison and of a batch search, and where it is offered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streamlit.testing.v1 import AppTest

from ampscope.records import State
from ampscope.store.reader import Reader
from ampscope.story.build import document
from ampscope.story.document import Part, Table
from tests.helpers import made_comparisons


def part_of(store: Path, run: str) -> Part:
    with Reader(store) as reader:
        return document(reader, [run]).parts[0]


def missing(part: Part) -> dict[str, str]:
    (section,) = [s for s in part.sections if s.title == "What is missing"]
    tables = [block for block in section.blocks if isinstance(block, Table)]
    return {row[0]: row[1] for table in tables for row in table.rows}


def test_a_comparison_says_what_it_lacks(tmp_path: Path) -> None:
    results = [r for r in made_comparisons.compared() if getattr(r, "is_base", True)]
    run = made_comparisons.stored(tmp_path / "a.db", "compare", results)
    assert set(missing(part_of(tmp_path / "a.db", run))) == {"A GPU", "Energy", "Telemetry"}
    half = [r for r in results if type(r).__name__ != "MemorySplit" or r.precision == "fp32"]
    run = made_comparisons.stored(tmp_path / "a.db", "compare", half, State.CANCELLED, "Stopped.")
    found = missing(part_of(tmp_path / "a.db", run))
    assert found["Split memory in bf16"]
    assert "Split memory in fp32" not in found
    assert found["The rest of the measurement"] == "It is cancelled. Stopped."


def test_a_search_answers_and_says_what_it_lacks(tmp_path: Path) -> None:
    store = tmp_path / "a.db"
    whole = part_of(store, made_comparisons.stored(store, "batch", made_comparisons.searched()))
    assert "200 samples (208 do not)" in whole.title
    searched = made_comparisons.searched()[:-1]  # without where bf16's ended
    run = made_comparisons.stored(store, "batch", searched)
    assert missing(part_of(store, run))["The largest batch in bf16"] == "Its search did not end."


def test_a_comparison_has_its_files(store_path: Path, open_page: Callable[..., AppTest]) -> None:
    run = made_comparisons.stored(store_path, "compare", made_comparisons.compared())
    app = open_page("compare", compare=run)
    assert not app.exception
    offered = [b.proto.label for b in app.get("download_button") if b.proto.id]
    assert {"HTML, one file", "Markdown, for an issue", "Notebook that loads the run"} <= {*offered}
