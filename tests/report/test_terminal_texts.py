"""A stranger's texts in a terminal: shown, and never obeyed by it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ampscope.cli.main import main
from ampscope.cli.progress import follow
from ampscope.cli.tables import messages, probe_table, runs_table
from ampscope.diagnosis.load import load_diagnosis
from ampscope.records import Event, Machine, State
from ampscope.render.terminal import print_sections
from ampscope.store import export
from ampscope.store.importing import import_file
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.story.diagnosis import summary
from tests.helpers import script_stores, stores, watched_stores

# Name the window; clear the screen; C1's own CSI; turn the line round; back over what stands there.
OBEYED = ("\x1b]0;x\x07", "\x1b[2J", "\x9b2J", "\u202e", "\x08\x08\x08")


def shown(*things: object) -> str:
    """As a terminal gets it, colours off."""
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True, color_system=None)
    for thing in things:
        console.print(thing, markup=False)
    return out.getvalue()


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def imported(folder: Path, text: str) -> Path:
    """A store that has a run from a file whose every text is ``text``."""
    source, out = folder / "a.db", folder / "a.json"
    writer = RunWriter.create(source, replace(stores.SPEC, label=text, precision=text))
    writer.start(Machine(text, text, text))
    writer.finish(State.FAILED, text)
    writer.close()
    with Reader(source) as reader:
        export.to_json(reader, reader.runs(), out)
    import_file(out, folder / "b.db")
    return folder / "b.db"


@pytest.mark.parametrize("text", OBEYED, ids=ascii)
def test_tables_and_messages_of_imported_runs(tmp_path: Path, text: str) -> None:
    store = imported(tmp_path, f"a{text}b")
    spelled = "a" + "".join(ascii(c)[1:-1] for c in text) + "b"
    with Reader(store) as reader:
        infos = reader.runs()
        tables = shown(runs_table(infos), probe_table(reader, infos))
        said = messages(infos)
    assert is_plain(tables)
    assert spelled in tables
    assert len(said) == 1
    assert is_plain(said[0])
    assert said[0].count(spelled) == 2  # title and message


def test_a_message_is_one_line(tmp_path: Path) -> None:
    """Else a stranger could add lines that look like ampscope's own."""
    store = imported(tmp_path, "a\nampscope: all is well")
    with Reader(store) as reader:
        (said,) = messages(reader.runs())
    assert "\n" not in said


@pytest.mark.parametrize("text", OBEYED, ids=ascii)
def test_a_diagnosis(tmp_path: Path, text: str) -> None:
    store, text = tmp_path / "a.db", f"a{text}b"
    spec = replace(script_stores.SPEC, label=text)
    head = script_stores.overflow(store, spec, script_stores.bad_op(text, text, text))
    with Reader(store) as reader:
        report = load_diagnosis(reader, head)
    out = io.StringIO()
    print_sections(
        summary(report), Console(file=out, width=200, force_terminal=True, color_system=None)
    )
    assert is_plain(out.getvalue())
    assert "Root cause" in out.getvalue()
    assert "".join(ascii(c)[1:-1] for c in text) in out.getvalue()


@pytest.mark.parametrize("text", OBEYED, ids=ascii)
def test_the_name_of_a_file(tmp_path: Path, text: str) -> None:
    source, path = tmp_path / "a.db", tmp_path / f"in{text}.json"
    stores.queued(source)
    with Reader(source) as reader:
        export.to_json(reader, reader.runs(), path)
    done = CliRunner().invoke(main, ["import", str(path), "--store", str(tmp_path / "b.db")])
    assert done.output.startswith("Imported ")
    assert is_plain(done.output)
    with Reader(tmp_path / "b.db") as reader:
        info = reader.runs()[0]
    spelled = "in" + "".join(ascii(c)[1:-1] for c in text) + ".json"
    assert info.spec.imported.startswith(f"{spelled} on 20")
    assert is_plain(info.message)
    path.write_text(json.dumps({}))
    again = CliRunner().invoke(main, ["import", str(path), "--store", str(tmp_path / "b.db")])
    assert again.exit_code == 2
    assert f"ampscope: {spelled} was not imported" in again.output
    assert is_plain(again.output)


def test_delete_asks_in_plain_text(tmp_path: Path) -> None:
    store = imported(tmp_path, "a\x1b]0;x\x07b")
    with Reader(store) as reader:
        run = reader.runs()[0].id
    asked = CliRunner().invoke(main, ["runs", "delete", run, "--store", str(store)], input="n\n")
    assert is_plain(asked.output)


@pytest.mark.parametrize("text", OBEYED, ids=ascii)
def test_the_ranks_of_a_training(tmp_path: Path, text: str) -> None:
    """Where a rank went non-finite first is a module's name."""
    store = tmp_path / "a.db"
    for rank in range(2):
        writer = RunWriter.create(
            store, replace(watched_stores.SPEC, group=text, rank=rank, world=2)
        )
        writer.start(watched_stores.MACHINE)
        writer.add_event(Event(3, "nonfinite", f"a{text}b", "NaN"))
        writer.finish(State.FINISHED)
        writer.close()
    done = CliRunner().invoke(main, ["runs", "ranks", writer.run_id, "--store", str(store)])
    assert done.exit_code == 1
    assert is_plain(done.output)
    assert "a" + "".join(ascii(c)[1:-1] for c in text) + "b" in done.output


@pytest.mark.parametrize("text", OBEYED, ids=ascii)
def test_progress(tmp_path: Path, text: str) -> None:
    store, out = tmp_path / "a.db", io.StringIO()
    writer = RunWriter.create(store, replace(stores.SPEC, label=f"a{text}b"))
    writer.finish(State.FINISHED)
    writer.close()
    follow(store, [writer.run_id], Console(file=out, width=200, color_system=None))
    assert is_plain(out.getvalue())
    assert "a" + "".join(ascii(c)[1:-1] for c in text) + "b" in out.getvalue()
