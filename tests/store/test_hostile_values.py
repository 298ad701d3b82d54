"""Values in a store that nothing of ampscope writes: a sentence instead, and the rest is shown."""

from __future__ import annotations

import os
import socket
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.errors import StoreBusy, StoreError
from ampscope.records import Event, Machine, ModuleRecord, Role, RunSpec, State
from ampscope.store import codec
from ampscope.store.export import to_json
from ampscope.store.importing import import_file
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from tests.helpers import stores
from tests.helpers import watched_stores as watched
from tests.helpers.pages import texts
from tests.helpers.stores import change

Open = Callable[..., Any]
HALF = "caf\udcff.py"  # what Python makes of the file name b"caf\xff.py"
PAGES = ("home", "training", "layers", "gradients", "diagnosis", "loss_scale", "telemetry")


def refused(read: Callable[[], object]) -> str:
    """Why the store refuses; "" where it does not."""
    try:
        read()
    except StoreError as error:
        return str(error)
    return ""


def named(store: Path, text: str) -> str:
    """A run all of whose names are ``text``."""
    spec = replace(watched.SPEC, workload=text, label=text, args=(text,))
    writer = RunWriter.create(store, spec)
    writer.start(Machine(text, text, "native", text, text, text, text, text))
    writer.add_modules([ModuleRecord(0, "", text), ModuleRecord(1, text, text, text, 100)])
    for record in watched.good(12):
        writer.add_step(record)
    writer.add_event(Event(8, "alarm", text, text, text, 1.0))
    writer.finish(State.FAILED, text, text)
    writer.close()
    return writer.run_id


# --- names


def test_a_name_that_is_no_utf8_is_stored_and_comes_back_as_text(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    run_id = named(store, HALF)
    with Reader(store) as reader:
        (info,) = reader.runs()
        assert info.spec.workload == info.spec.label == info.message == "caf\\udcff.py"
        assert info.machine is not None
        assert info.machine.device_name == "caf\\udcff.py"
        assert reader.modules(run_id)[1].path == "caf\\udcff.py"
        assert reader.events(run_id)[0].text == "caf\\udcff.py"
        out = tmp_path / "run.json"
        to_json(reader, [info], out)
    assert import_file(out, tmp_path / "other.db")


@pytest.mark.parametrize("page", PAGES)
def test_such_a_name_breaks_no_page(page: str, store_path: Path, open_page: Open) -> None:
    stores.finished(store_path)
    run_id = named(store_path, HALF)
    app = open_page(page, run=run_id)
    assert not app.exception
    assert "could not be drawn" not in texts(app)


def test_a_half_character_that_an_older_version_stored(store_path: Path, open_page: Open) -> None:
    good, bad = stores.finished(store_path), stores.finished(store_path)
    sql = "UPDATE run SET spec=replace(spec, ?, ?) WHERE id=?"
    change(store_path, sql, '"label":""', '"label":"n\\ud800m"', bad)
    with Reader(store_path) as reader:
        assert {r.id: r.spec.label for r in reader.runs()} == {good: "", bad: "n\\ud800m"}
    app = open_page("home")
    assert not app.exception
    assert "nud800m" in texts(app)  # texts() takes backslashes out


def test_a_text_of_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    run_id = stores.finished(store)
    change(store, "UPDATE run SET message=CAST(x'ff41' AS TEXT) WHERE id=?", run_id)
    with Reader(store) as reader:
        assert reader.run(run_id).message == "\\xffA"


def test_texts_of_any_length_are_cut_at_the_door(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    run_id = named(store, "n" * 100_000)
    with Reader(store) as reader:
        info = reader.run(run_id)
        found = [info.spec.label, info.message, reader.events(run_id)[0].text]
        assert all(len(text) <= codec.LONGEST + 40 for text in found)
        assert "characters left out" in info.message
        assert len(info.traceback) == 100_000


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_the_beginning_of_a_long_text(
    page: str, store_path: Path, open_page: Open
) -> None:
    run_id = named(store_path, "/" + "n" * 9_999)
    app = open_page(page, run=run_id)
    assert not app.exception
    assert "File name too long" not in texts(app)
    assert all(len(m.value) < 5_000 for m in (*app.markdown, *app.caption, *app.warning))


# --- one damaged run among others

ROWS = {
    "spec that is no JSON": ("spec", "{"),
    "spec nested too deep": ("spec", "[" * 100_000),
    "spec that is a list": ("spec", "[]"),
    "spec that is a blob": ("spec", b"\xff\xfe"),
    "steps that are a text": ("spec", '{"workload":"gpt","steps":"many"}'),
    "steps beyond 64 bits": ("spec", '{"workload":"gpt","steps":1' + "0" * 400 + "}"),
    "a loss factor that is NaN": ("spec", '{"workload":"gpt","loss_factor":NaN}'),
    "more ranks than any training has": ("spec", '{"workload":"gpt","world":1000000000}'),
    "a rank beyond those": ("spec", '{"workload":"gpt","rank":-1000000000}'),
    "args that are a number": ("spec", '{"workload":"gpt","args":5}'),
    "args that are no texts": ("spec", '{"workload":"gpt","args":[5]}'),
    "settings that are a text": ("spec", '{"workload":"gpt","settings":"abc"}'),
    "a machine that is a list": ("machine", "[]"),
    "a state that is none": ("state", "dancing"),
    "a time that is a text": ("created", "yesterday"),
    "a time beyond the calendar": ("started", 1e300),
    "steps done that are a text": ("steps_done", "x"),
    "a message that is a blob": ("message", b"\x00"),
    "a process number beyond bounds": ("pid", 2**62),
}


@pytest.mark.parametrize("which", ROWS)
def test_a_damaged_run_hides_no_other(which: str, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    good, bad = stores.finished(store), stores.queued(store)
    column, value = ROWS[which]
    change(store, f"UPDATE run SET {column}=? WHERE id=?", value, bad)
    with Reader(store) as reader:
        found = {run.id: run for run in reader.runs()}
        assert reader.run(good).state is State.FINISHED
    assert set(found) == {good, bad}
    assert found[good].state is State.FINISHED
    assert "is damaged (" in found[bad].message
    assert found[bad].spec.label == "damaged run"


@pytest.mark.parametrize("page", PAGES)
def test_a_damaged_run_hides_no_other_on_a_page(
    page: str, store_path: Path, open_page: Open
) -> None:
    good, bad = stores.finished(store_path), stores.finished(store_path)
    change(store_path, "UPDATE run SET spec='{' WHERE id=?", bad)
    app = open_page(page, run=good)
    assert not app.exception
    assert "could not be drawn" not in texts(app)
    if page == "home":
        assert "damaged run" in texts(app)
        assert "gpt tiny fp16" in texts(app)


# --- damaged values of one run

VALUES = {
    "a step's loss is a text": "UPDATE step SET loss='high'",
    "a step's loss is a blob": "UPDATE step SET loss=x'00'",
    "a step's scale is a text": "UPDATE step SET scale='wide'",
    "a step's op set is a text": "UPDATE step SET op_set='x'",
    "a sum over steps is a text": "UPDATE step_block SET steps='x'",
    "a module's path is a blob": "UPDATE module SET path=x'ff'",
    "a count of parameters is a text": "UPDATE module SET parameter_count='x'",
    "an op's FLOPs are a text": "UPDATE op SET flops='x'",
    "a histogram is no histogram": "UPDATE frame SET blob=x'0102'",
    "a histogram is a text": "UPDATE frame SET blob='x'",
    "a histogram's scale is a text": "UPDATE frame SET scale='x'",
    "a frame's last step is a text": "UPDATE frame SET last_step='x'",
    "a shadow's count is a text": "UPDATE shadow SET lost='x'",
    "a role that is none": "UPDATE shadow SET role='hat' || role",
    "a report's text is a blob": "UPDATE event SET text=x'ff'",
    "a gradient's name is a blob": "UPDATE nonfinite SET parameter=x'ff'",
}


@pytest.mark.parametrize("which", VALUES)
def test_a_damaged_value_is_one_sentence_of_the_reader(which: str, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    run_id = stores.finished(store)
    writer = RunWriter(store, run_id)
    writer.add_event(Event(1, "note", "n", "t"))
    writer.close()
    change(store, VALUES[which])
    with Reader(store) as reader:
        reads: list[Callable[[], object]] = [
            lambda: reader.steps(run_id),
            lambda: reader.modules(run_id),
            lambda: reader.ops(run_id, 0),
            lambda: reader.shadows(run_id),
            lambda: reader.nonfinite(run_id),
            lambda: reader.events(run_id),
            lambda: [reader.frame_spans(run_id, role) for role in Role],
            lambda: [list(reader.frames(run_id, role)) for role in Role],
        ]
        said = [told for read in reads if (told := refused(read))]
    assert all("is damaged (" in sentence for sentence in said)


SEEN = {
    "layers": ("a module's path is a blob", "an op's FLOPs are a text"),
    "gradients": ("a histogram is no histogram", "a shadow's count is a text"),
    "loss_scale": ("a step's loss is a text", "a gradient's name is a blob"),
}


@pytest.mark.parametrize(
    ("page", "which"), [(page, which) for page, some in SEEN.items() for which in some]
)
def test_a_damaged_value_leaves_the_rest_of_a_page(
    which: str, page: str, store_path: Path, open_page: Open
) -> None:
    run_id = stores.finished(store_path)
    change(store_path, VALUES[which])
    app = open_page(page, run=run_id)
    assert not app.exception
    assert "The page" not in " ".join(e.value for e in app.error)
    for error in app.error:
        assert "damaged" in error.value


def test_damaged_reports_leave_the_curves_of_a_training(store_path: Path, open_page: Open) -> None:
    writer = watched.begun(store_path, watched.good(40))
    writer.add_event(Event(8, "alarm", "divergence", "It diverges."))
    writer.close()
    change(store_path, "UPDATE event SET text=x'ff'")
    app = open_page("training", run=writer.run_id)
    assert not app.exception
    assert "A stored report is damaged" in app.error[0].value.replace("\\", "")
    assert "Over all steps" in [s.value for s in app.subheader]


def test_a_bomb_of_a_histogram_is_refused(tmp_path: Path) -> None:
    import zlib

    store = tmp_path / "runs.db"
    run_id = stores.finished(store)
    body = (2**27).to_bytes(4, "little") + bytes(2**20)
    change(store, "UPDATE frame SET blob=?", b"\x01" + zlib.compress(body + bytes(2**28), 9))
    with Reader(store) as reader, pytest.raises(StoreError, match="damaged"):
        reader.frame(run_id, Role.ACTIVATION, reader.frame_steps(run_id, Role.ACTIVATION)[0])


# --- files that are no store


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "runs.db"
    os.mkfifo(pipe)
    started = time.monotonic()
    for opened in (lambda: Reader(pipe), lambda: RunWriter.create(pipe, RunSpec("gpt"))):
        with pytest.raises(StoreError, match="a named pipe, not a file"):
            opened()
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_a_named_pipe_beside_a_store(suffix: str, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    stores.finished(store)
    beside = Path(f"{store}{suffix}")
    beside.unlink(missing_ok=True)
    os.mkfifo(beside)
    with pytest.raises(StoreError, match="a named pipe"):
        Reader(store)


def test_a_device_and_a_socket(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a device, not a file"):
        Reader(Path("/dev/zero"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(StoreError, match="a socket, not a file"):
            Reader(tmp_path / "s")


@pytest.mark.parametrize("page", PAGES)
def test_a_pipe_is_a_sentence_on_every_page(page: str, store_path: Path, open_page: Open) -> None:
    os.mkfifo(store_path)
    started = time.monotonic()
    app = open_page(page)
    assert not app.exception
    assert "named pipe" in texts(app) + " ".join(e.value for e in app.error)
    assert time.monotonic() - started < 15


def test_a_locked_store_is_waited_for_three_seconds(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    stores.finished(store)
    holder = sqlite3.connect(store, isolation_level=None)
    holder.execute("PRAGMA journal_mode=DELETE")
    holder.execute("BEGIN EXCLUSIVE")
    started = time.monotonic()
    with pytest.raises(StoreBusy, match="held by another program"):
        Reader(store)
    assert 2.0 < time.monotonic() - started < 6.0
    holder.close()


def test_a_page_tries_a_locked_store_again(store_path: Path, open_page: Open) -> None:
    stores.finished(store_path)
    holder = sqlite3.connect(store_path, isolation_level=None, check_same_thread=False)
    holder.execute("PRAGMA journal_mode=DELETE")
    holder.execute("BEGIN EXCLUSIVE")
    app = open_page("home")
    assert not app.exception
    assert "held by another program" in app.error[0].value
    assert any("tries again" in c.value for c in app.caption)
    threading.Timer(0.5, holder.close).start()
    time.sleep(1.0)
    app.run()
    assert not app.error


# --- permissions


def test_a_store_and_its_folder_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        store = tmp_path / "new" / "deeper" / "runs.db"
        stores.running(store)
    finally:
        os.umask(before)
    for file in store.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    for folder in (store.parent, store.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_is_there_keeps_its_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    stores.finished(folder / "runs.db")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert stat.S_IMODE((folder / "runs.db").stat().st_mode) == 0o600


def test_bytes_in_the_schema_are_one_sentence(tmp_path: Path) -> None:
    """SQLite quotes them in its message, be they UTF-8 or not, escapes of a terminal or not."""
    store = tmp_path / "runs.db"
    stores.finished(store)
    good = store.read_bytes()
    for byte in (b"\xfd", b"\x1b", b"\x03", b"\n"):
        store.write_bytes(good.replace(b"CREATE TABLE event (", b"CREATE TABLE event " + byte))
        said = refused(lambda: Reader(store).close())
        assert "is damaged" in said
        assert said.isprintable()
