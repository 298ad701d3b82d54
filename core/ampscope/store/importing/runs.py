"""A file that `ampscope runs export` wrote, as new runs of a store; or read without any store.

    import_file(Path("run.json"), store)      # [Imported("1ff374f51ded", "1ff374f51ded")]
    with opened(Path("run.json")) as reader:  # the same reader as for a store
        reader.runs()

Nothing is written before :mod:`.tables` and :mod:`.values` have checked the whole file.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ampscope.errors import BadInput
from ampscope.files import TemporaryFolder
from ampscope.numerics.histogram import RAW_LEN
from ampscope.record_json import Refusal, quoted
from ampscope.records import Curve, Frame, Histogram, Matmul, Result, RunSpec, State
from ampscope.store import codec, db, frames, pyramid
from ampscope.store import rows as store_rows
from ampscope.store.codec import is_run_id
from ampscope.store.export import SCHEMA
from ampscope.store.frames import DTYPE_CODES
from ampscope.store.importing import tables, values
from ampscope.store.importing.tables import Contents, Counts, HistogramRow
from ampscope.store.importing.values import ForbiddenJson, fields, read, rows
from ampscope.store.reader import Reader
from ampscope.store.rows import new_run_id


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
    ids = write(store, found, f"{_plain(path)} on {when}")
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
                if (own := found[-1].info.id) in ids:
                    why = "another run of the file has this id"
                    raise Refusal("duplicate", why).inside("id").inside("run")
                ids.add(own)
            except Refusal as refusal:
                raise refusal.inside(place) from None
        if not found:
            raise Refusal("value", "there is no run in it")
    except Refusal as refusal:
        raise refusal.inside("runs") from None
    return found


def _check_schema(document: dict[str, object]) -> None:
    if "schema" not in document:
        raise Refusal("schema", "it has no schema: this is no file of ampscope runs export")
    schema = document["schema"]
    if isinstance(schema, ForbiddenJson) or type(schema) is not int or schema != SCHEMA:
        shown = quoted(None if isinstance(schema, ForbiddenJson) else schema)
        again = ". Export it again with this version" if schema == 1 else ""
        raise Refusal("schema", f"it has schema {shown}; this ampscope reads {SCHEMA}{again}")


def _run(body: object) -> Contents:
    run = tables.contents(body)
    check_references(run)
    check_histograms(run.histograms)
    return run


def check_references(run: Contents) -> None:
    """What stands once, and what must be there: raises Refusal for the first row that does not fit
    the others."""
    if not is_run_id(run.info.id):
        why = f"{quoted(run.info.id)} is not 12 hexadecimal digits"
        raise Refusal("value", why).inside("id").inside("run")
    _once("step", ((s.step,) for s in run.steps), "step")
    _once("module", ((m.index,) for m in run.modules), "module")
    _once(
        "op",
        ((n, o.module, o.phase, o.op, o.inputs, o.outputs) for n, o in run.ops),
        "op in the same set, module, phase and dtypes",
    )
    _once("shadow", ((s.step, s.role, s.module) for s in run.shadows), "step, role and module")
    _once("nonfinite", ((n.step, n.order) for n in run.nonfinite), "step and order")
    _once("telemetry", ((s.device, s.at) for s in run.samples), "device and time")
    modules = {m.index for m in run.modules}
    _known("op", (o.module for _, o in run.ops), "module", modules)
    _known("shadow", (s.module for s in run.shadows), "module", modules)
    _known("histogram", (row.module for row, _ in run.histograms), "module", modules)
    for place, result in enumerate(run.results):
        try:
            _check_result(result)
        except Refusal as refusal:
            raise refusal.inside(place).inside("result") from None
    sets = {number for number, _ in run.ops}
    _known("step", (s.op_set for s in run.steps), "op_set", sets)


def _check_result(result: Result) -> None:
    """Lists of one result that belong together, value by value."""
    if isinstance(result, Matmul):
        for nth, operand in enumerate(result.operands):
            if len(operand.shape) != len(operand.stride):
                why = f"{len(operand.stride)} distances were given for {len(operand.shape)} sizes"
                raise Refusal("reference", why).inside("stride").inside(nth).inside("operands")
    elif isinstance(result, Curve) and len(result.x) != len(result.y):
        why = f"{len(result.y):,} values were given for {len(result.x):,} of x"
        raise Refusal("reference", why).inside("y")
    elif isinstance(result, Histogram) and len(result.row) != RAW_LEN:
        why = f"{len(result.row):,} counts were given; a histogram has {RAW_LEN}"
        raise Refusal("reference", why).inside("row")


def _once(table: str, keys: Iterable[tuple[object, ...]], what: str) -> None:
    seen: dict[tuple[object, ...], int] = {}
    for place, key in enumerate(keys):
        if key in seen:
            why = f"{table}[{seen[key]}] has the same {what}"
            raise Refusal("duplicate", why).inside(place).inside(table)
        seen[key] = place


def _known(table: str, numbers: Iterable[int | None], name: str, known: set[int]) -> None:
    for place, number in enumerate(numbers):
        if number is not None and number not in known:
            why = f"there is no {name} {number}"
            raise Refusal("reference", why).inside(name).inside(place).inside(table)


Histograms = list[tuple[HistogramRow, Counts]]


def check_histograms(histograms: Histograms) -> None:
    """Those of one frame must agree on the loss scale and on the steps that they add up, and be of
    different modules or dtypes."""
    for places in _together(histograms):
        first = histograms[places[0]][0]
        if len(places) > values.MOST_HISTOGRAMS:
            why = (
                f"{len(places):,} are of one step and role, and {values.MOST_HISTOGRAMS:,} are read"
            )
            raise Refusal("size", f"{why} at most").inside("histogram")
        seen: dict[tuple[int, str], int] = {}
        for place in places:
            row = histograms[place][0]
            if row.dtype not in DTYPE_CODES:
                why = f"it is none of {', '.join(DTYPE_CODES)}"
                raise Refusal("value", why).inside("dtype").inside(place).inside("histogram")
            if repr(row.scale) != repr(first.scale) or row.last_step != first.last_step:
                why = f"its scale or last_step differ from those of histogram[{places[0]}]"
                raise Refusal("reference", why).inside(place).inside("histogram")
            key = (row.module, row.dtype)
            if key in seen:
                why = f"histogram[{seen[key]}] has the same step, role, module and dtype"
                raise Refusal("duplicate", why).inside(place).inside("histogram")
            seen[key] = place


def _together(histograms: Histograms) -> list[list[int]]:
    """Places of the histograms of each frame."""
    found: dict[tuple[str, int], list[int]] = {}
    for place, (row, _) in enumerate(histograms):
        found.setdefault((row.role, row.step), []).append(place)
    return list(found.values())


STILL_RUNNING = "It was still running when it was exported."


def write(store: Path, runs: Sequence[Contents], origin: str) -> list[str]:
    """Write checked runs in one transaction, all of them or none. Returns the ids in the store, in
    the same order. A run whose id is taken gets a new one, and every group gets a new name:
    imported runs must not join a diagnosis that is there."""
    connection = db.open_for_writing(store)
    with contextlib.closing(connection), db.translated(store), db.transaction(connection):
        ids = {run.info.id: _free(connection, run.info.id) for run in runs}
        groups = {run.info.spec.group: f"imported-{new_run_id()}" for run in runs}
        groups[""] = ""
        for run in runs:
            spec = replace(
                run.info.spec,
                group=groups[run.info.spec.group],
                parent=ids.get(run.info.spec.parent, ""),  # never a run that is there already
                imported=origin,
            )
            run_id = ids[run.info.id]
            store_rows.insert(connection, [_row(run_id, spec, run)])
            store_rows.insert(connection, _rows(run_id, run))
            pyramid.update(connection, run_id, [step.step for step in run.steps])
    return [ids[run.info.id] for run in runs]


def _free(connection: sqlite3.Connection, wanted: str) -> str:
    while connection.execute("SELECT 1 FROM run WHERE id=?", (wanted,)).fetchone():
        wanted = new_run_id()
    return wanted


def _row(run_id: str, spec: RunSpec, run: Contents) -> store_rows.Insert:
    """No process writes it any more: it has no process, and a state that a run can end in."""
    info = run.info
    still_running = STILL_RUNNING if info.state.is_active else ""
    message = (info.message, still_running, f"Imported from {spec.imported}.")
    return store_rows.of_row(
        "run",
        {"traceback": codec.imported_traceback(info.traceback)},
        id=run_id,
        spec=codec.to_json(spec),
        state=State.LOST if info.state.is_active else info.state,
        created=info.created,
        started=info.started,
        ended=info.ended,
        heartbeat=info.heartbeat,
        machine=None if info.machine is None else codec.to_json(info.machine),
        message=" ".join(filter(None, message)),
        steps_done=len(run.steps) + len(run.results),
    )


def _rows(run_id: str, run: Contents) -> Iterator[store_rows.Insert]:
    yield from store_rows.of_records("step", run_id, run.steps)
    yield from store_rows.of_records("module", run_id, run.modules)
    yield from store_rows.of_records("shadow", run_id, run.shadows)
    yield from store_rows.of_records("nonfinite", run_id, run.nonfinite)
    yield from store_rows.of_records("telemetry", run_id, run.samples)
    for number, op in run.ops:
        yield from store_rows.of_records("op", run_id, (op,), op_set=number)
    for seq, event in enumerate(run.events):
        yield from store_rows.of_records("event", run_id, (event,), seq=seq)
    for seq, observation in enumerate(run.observations):
        kind, data = codec.encode_observation(observation, imported=True)
        yield store_rows.of_row("observation", run=run_id, seq=seq, kind=kind, data=data)
    for seq, result in enumerate(run.results):
        kind, data = codec.encode_result(result)
        yield store_rows.of_row("result", run=run_id, seq=seq, kind=kind, data=data)
    for frame in read_frames(run.histograms):
        blob = frames.pack(frame.modules, frame.dtypes, frame.rows)
        key = {"run": run_id, "step": frame.step, "role": frame.role}
        yield store_rows.of_row(
            "frame", **key, scale=frame.scale, blob=blob, last_step=frame.last_step
        )


def read_frames(histograms: Histograms) -> Iterator[Frame]:
    """One at a time: unpacked, all of a large file would take several times the memory."""
    for places in _together(histograms):
        own = [histograms[place] for place in places]
        rows = np.zeros((len(own), RAW_LEN), np.int64)
        for number, (_, counts) in enumerate(own):
            rows[number, counts[0]] = counts[1]
        first = own[0][0]
        yield Frame(
            first.step,
            first.role,
            tuple(row.module for row, _ in own),
            tuple(row.dtype for row, _ in own),
            rows,
            first.scale,
            first.last_step,
        )


def _plain(path: Path) -> str:
    """A file's name as text that can be stored and shown, whatever bytes it is made of."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in path.name)


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


class _FileReader(Reader):
    """Reads a store that goes away with it."""

    def __init__(self, store: Path, folder: TemporaryFolder) -> None:
        super().__init__(store)
        self._folder = folder

    def close(self) -> None:
        super().close()
        self._folder.cleanup()
