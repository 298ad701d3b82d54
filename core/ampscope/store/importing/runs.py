"""A file that `ampscope runs export` wrote, as new runs of a store; or read without any store.

import_file(Path("run.json"), store)      # [Imported("1ff374f51ded", "1ff374f51ded")]
with opened(Path("run.json")) as reader:  # the same reader as for a store
    reader.runs()
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from ampscope.errors import BadInput
from ampscope.store import db
from ampscope.store.export import SCHEMA
from ampscope.store.importing import histograms, references, tables, writing
from ampscope.store.importing.reading import Unreadable, read
from ampscope.store.importing.refusal import Refusal, quoted
from ampscope.store.importing.tables import Contents
from ampscope.store.importing.values import fields, rows
from ampscope.store.reader import Reader
from ampscope.temporary import TemporaryFolder


@dataclass(frozen=True, slots=True)
class Imported:
    """One run: its id in the file, and the one that it has now."""

    was: str
    run_id: str


def import_file(path: Path, store: Path) -> list[Imported]:
    """Write every run of the file as a new run. Raises BadInput with the place that is wrong; the
    store is not touched then."""
    try:
        found = checked(read(path))
    except Refusal as refusal:
        name = _plain(path)
        raise Refusal(refusal.sort, f"{name} was not imported: {refusal}.") from None
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    ids = writing.write(store, found, f"{_plain(path)} on {when}")
    return [Imported(run.info.id, id_) for run, id_ in zip(found, ids, strict=True)]


def checked(value: object) -> list[Contents]:
    """Every run of a file's value. Raises Refusal."""
    document = fields(value)
    _check_schema(document)
    bodies = document.get("runs")
    if bodies is None:
        return [_run({name: part for name, part in document.items() if name != "schema"})]
    for name in document:
        if name not in ("schema", "runs"):
            raise Refusal("key", "a file of several runs has no such part").inside(name)
    found: list[Contents] = []
    ids: set[str] = set()
    try:
        for place, body in enumerate(rows(bodies)):
            try:
                found.append(_run(body))
                _check_new(found[-1].info.id, ids)
            except Refusal as refusal:
                raise refusal.inside(place) from None
        if not found:
            raise Refusal("value", "there is no run in it")
    except Refusal as refusal:
        raise refusal.inside("runs") from None
    return found


class _FileReader(Reader):
    """Reads a store that goes away with it."""

    def __init__(self, store: Path, folder: TemporaryFolder) -> None:
        super().__init__(store)
        self._folder = folder

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def opened(source: Path | str) -> Reader:
    """A reader of a store, or of an exported file, which is checked as for an import. Raises
    BadInput and StoreError."""
    path = Path(source)
    return _imported_apart(path) if _is_other_file(path) else Reader(path)


def _is_other_file(path: Path) -> bool:
    """Whether it can be read and is no store."""
    with contextlib.suppress(OSError):
        if not path.is_file() or not path.stat().st_size:  # a pipe would wait, as would /proc/kmsg
            return False
        return not db.is_database(path)
    return False


def _imported_apart(path: Path) -> Reader:
    """The file in a store of its own, which goes away with the reader. Raises BadInput."""
    try:
        folder = TemporaryFolder()
    except OSError as error:
        raise BadInput(f"No folder can be made to read {_plain(path)} in: {error}.") from error
    try:
        store = Path(folder.name) / "runs.db"
        import_file(path, store)
        return _FileReader(store, folder)
    except BaseException:
        folder.cleanup()
        raise


def _run(body: object) -> Contents:
    run = tables.contents(body)
    references.check(run)
    histograms.check(run.histograms)
    return run


def _check_new(own: str, others: set[str]) -> None:
    if own in others:
        raise Refusal("duplicate", "another run of the file has this id").inside("id").inside("run")
    others.add(own)


def _check_schema(document: dict[str, object]) -> None:
    if "schema" not in document:
        raise Refusal("schema", "it has no schema: this is no file of ampscope runs export")
    schema = document["schema"]
    if isinstance(schema, Unreadable) or type(schema) is not int or schema != SCHEMA:
        shown = quoted(None if isinstance(schema, Unreadable) else schema)
        again = ". Export it again with this version" if schema == 1 else ""
        raise Refusal("schema", f"it has schema {shown}; this ampscope reads {SCHEMA}{again}")


def _plain(path: Path) -> str:
    """A file's name as text that can be stored and shown, whatever bytes it is made of."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in path.name)
