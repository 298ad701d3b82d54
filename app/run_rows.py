"""The rows of the runs, read once for all browsers until the file changes.

A page that follows a run asks for them twice a second; between two commits of the writer that costs
two calls of stat.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import streamlit as st

from ampscope.records import RunInfo, RunSpec
from ampscope.store import codec, sharing
from ampscope.store.reader import Reader, StoredVerdict

T = TypeVar("T")
MAX_KEPT = 32  # lists of runs, groups and single runs; a list may hold thousands
MAX_SPECS = 100  # of lessons, in all settings


def newest(path: Path, limit: int) -> tuple[RunInfo, ...]:
    """Newest first."""
    return _kept(path, f"newest {limit}", lambda reader: tuple(reader.runs(limit)))


def one(path: Path, run_id: str) -> RunInfo:
    """Raises BadInput when there is no such run."""
    return _kept(path, f"one {run_id}", lambda reader: reader.run(run_id))


def group(path: Path, name: str) -> tuple[RunInfo, ...]:
    """Runs that were started together, oldest first."""
    return _kept(path, f"group {name}", lambda reader: tuple(reader.group(name)))


def conclusion(path: Path, run_id: str) -> str:
    """What was stored when the diagnosis of this baseline run ended; "" when nothing was."""
    return _kept(path, f"conclusion {run_id}", lambda reader: reader.conclusion(run_id))


def verdicts(path: Path) -> dict[str, StoredVerdict]:
    """Baseline run -> its stored conclusion, of all diagnoses that concluded."""
    return _kept(path, "verdicts", lambda reader: reader.verdicts(), ages=False)


def with_alarms(path: Path) -> frozenset[str]:
    """Watched runs that have reported an alarm."""
    return _kept(path, "alarms", lambda reader: reader.with_alarms(), ages=False)


def shared(path: Path) -> frozenset[str]:
    """Ids of the runs that a class may look at."""
    return _read(str(path), "shared", _stamp(path), sharing.shared)


def of_spec(path: Path, spec: RunSpec) -> tuple[RunInfo, ...]:
    """Runs that were asked for exactly so, newest first."""
    return _of_spec(str(path), codec.to_json(spec), spec, _stamp(path))


def _kept(path: Path, what: str, read: Callable[[Reader], T], *, ages: bool = True) -> T:
    """``ages``: it may change while nothing is written, as a run is lost."""

    def opened(path: Path) -> T:
        with Reader(path) as reader:
            return read(reader)

    return _read(str(path), what, _stamp(path, ages=ages), opened)


def _stamp(path: Path, *, ages: bool = True) -> tuple[int, ...]:
    """Changes with every commit (a commit is written to the file or to its log), and every second
    where ``ages``: that a run is lost shows in no file."""
    files = (path, path.with_name(f"{path.name}-wal"))
    found = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # there is no log while no process writes
            found.append(file.stat())
    second = int(time.time()) if ages else 0
    return (*(n for s in found for n in (s.st_mtime_ns, s.st_size)), second)


@st.cache_resource(show_spinner=False, max_entries=MAX_KEPT)
def _read(path: str, what: str, stamp: tuple[int, ...], _read: Callable[[Path], T]) -> T:
    return _read(Path(path))  # the underscore keeps it out of the key; ``what`` names it there


@st.cache_resource(show_spinner=False, max_entries=MAX_SPECS)
def _of_spec(
    path: str, text: str, _spec: RunSpec, stamp: tuple[int, ...]
) -> tuple[RunInfo, ...]:  # the text is the key: it is quicker to hash
    return tuple(sharing.of_spec(Path(path), _spec))
