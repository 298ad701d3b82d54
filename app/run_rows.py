"""The rows of the runs, read once for all browsers until the file changes.

A page that follows a run asks for them twice a second; between two commits of the writer that costs
two calls of stat.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import streamlit as st

from ampscope.records import RunInfo, RunSpec
from ampscope.store import codec, sharing
from ampscope.store.reader import Reader

MAX_LISTS = 16
MAX_SPECS = 100  # of lessons, in all settings


def newest(path: Path, limit: int) -> tuple[RunInfo, ...]:
    """Newest first."""
    return _runs(str(path), limit, _stamp(path))


def one(path: Path, run_id: str) -> RunInfo:
    """Raises BadInput when there is no such run."""
    return _run(str(path), run_id, _stamp(path))


def group(path: Path, name: str) -> tuple[RunInfo, ...]:
    """Runs that were started together, oldest first."""
    return _group(str(path), name, _stamp(path))


def shared(path: Path) -> frozenset[str]:
    """Ids of the runs that a class may look at."""
    return _shared(str(path), _stamp(path))


def of_spec(path: Path, spec: RunSpec) -> tuple[RunInfo, ...]:
    """Runs that were asked for exactly so, newest first."""
    return _of_spec(str(path), codec.to_json(spec), spec, _stamp(path))


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes with every commit (a commit is written to the file or to its log), and every second:
    that a run is lost shows in no file."""
    files = (path, path.with_name(f"{path.name}-wal"))
    found = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # there is no log while no process writes
            found.append(file.stat())
    return (*(n for s in found for n in (s.st_mtime_ns, s.st_size)), int(time.time()))


@st.cache_resource(show_spinner=False, max_entries=MAX_LISTS)
def _runs(store: str, limit: int, stamp: tuple[int, ...]) -> tuple[RunInfo, ...]:
    with Reader(Path(store)) as reader:
        return tuple(reader.runs(limit))


@st.cache_resource(show_spinner=False, max_entries=MAX_LISTS)
def _run(store: str, run_id: str, stamp: tuple[int, ...]) -> RunInfo:
    with Reader(Path(store)) as reader:
        return reader.run(run_id)


@st.cache_resource(show_spinner=False, max_entries=MAX_LISTS)
def _group(store: str, name: str, stamp: tuple[int, ...]) -> tuple[RunInfo, ...]:
    with Reader(Path(store)) as reader:
        return tuple(reader.group(name))


@st.cache_resource(show_spinner=False, max_entries=MAX_LISTS)
def _shared(store: str, stamp: tuple[int, ...]) -> frozenset[str]:
    return sharing.shared(Path(store))


@st.cache_resource(show_spinner=False, max_entries=MAX_SPECS)
def _of_spec(
    store: str, text: str, _spec: RunSpec, stamp: tuple[int, ...]
) -> tuple[RunInfo, ...]:  # the text is the key: it is quicker to hash
    return tuple(sharing.of_spec(Path(store), _spec))
