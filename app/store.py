"""Cached, read-only access to the store. Pages ask here and nowhere else.

What a run recorded is kept under (store, run, version): a finished run is read once, one that is
still written again whenever its version moves. Every function takes the RunInfo that a page holds,
so the page sees one version throughout. The rows of runs come from :mod:`app.run_rows`, and only of
those runs that the current user may see (app/permissions.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Concatenate, ParamSpec, TypeVar

import plotly.graph_objects as go
import streamlit as st

from ampscope.errors import AmpscopeError, BadInput, StoreError
from ampscope.privacy import for_others, without_folders
from ampscope.records import (
    Frame,
    ModuleRecord,
    OpRecord,
    RunInfo,
    Sample,
    ShadowRecord,
    StepRecord,
    StepTotals,
)
from ampscope.store.reader import Reader
from app import options, permissions, run_rows

P = ParamSpec("P")
_WITHOUT_FOLDERS = (StepRecord, ShadowRecord, Sample, OpRecord, ModuleRecord, tuple, int)
T = TypeVar("T")
logger = logging.getLogger("ampscope.dashboard")
MAX_ENTRIES = 96  # of about 1 MiB each for one frame of 500 modules
MAX_FIGURES = 16
# Steps of a chart that is about 1,000 px wide. Up to so many a run is shown as it was recorded.
POINTS = 2000
FAR = 4_000  # how far back a student's list looks for shared runs among the teacher's own


def path() -> Path:
    """The store that the operator named."""
    return options.current().store


def runs(limit: int = 200) -> list[RunInfo]:
    """Newest first; empty when there is no store yet. Raises StoreError when it cannot be read."""
    if not path().exists():
        return []
    return list(visible_newest(path(), limit))


def trainings(limit: int = 200) -> list[RunInfo]:
    """Runs that the pages of one run can show, newest first."""
    return [run for run in runs(limit) if run.spec.is_training]


def run(run_id: str) -> RunInfo:
    """As it is now. Raises BadInput when there is no such run."""
    return visible_one(path(), run_id)


def group(name: str) -> list[RunInfo]:
    """Runs that were started together, oldest first."""
    return list(visible_group(path(), name))


def version(info: RunInfo) -> str:
    """Changes whenever something may have been recorded. Steps alone do not tell: modules and ops
    can be flushed between two steps, and each flush moves the heartbeat."""
    moving = f":{info.heartbeat}" if info.state.is_active else ""
    return f"{info.state}:{info.steps_done}{moving}"


def of_run(
    read: Callable[Concatenate[Reader, str, P], T],
) -> Callable[Concatenate[RunInfo, P], T]:
    """Turn ``read(reader, run_id, …)`` into ``read(run_info, …)``, cached per run and version.

        @store.of_run
        def lost_by_module(reader: Reader, run_id: str, role: Role) -> …

    The function's name is part of the cache's key, so it must be its own (no lambda). Arguments
    must be hashable. Results are copied on every use, so a page may change what it gets.
    """

    def cached(info: RunInfo, /, *args: P.args, **kwargs: P.kwargs) -> T:
        permissions.require(permissions.may_see(info), "this run")
        name = f"{read.__module__}.{read.__qualname__}"
        named = tuple(sorted(kwargs.items()))
        result: T = _read(str(path()), info.id, version(info), name, args, named, read)
        return as_visible(result)

    return cached


@st.cache_data(show_spinner=False, max_entries=MAX_ENTRIES)
def _read(
    store: str,
    run_id: str,
    version: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    _read: Callable[..., Any],  # the leading underscore keeps it out of the key; `name` is in
) -> Any:
    with Reader(Path(store)) as reader:
        return read_or_damaged(run_id, lambda: _read(reader, run_id, *args, **dict(kwargs)))


def as_visible(result: T) -> T:
    """Without folders of this machine, for who may not know them."""
    if permissions.is_trusted() or not _may_name_folders(result):
        return result
    return for_others(result, folders=False)


def _may_name_folders(result: object) -> bool:
    if not isinstance(result, list):
        return not isinstance(result, Frame | StepTotals)
    return bool(result) and not isinstance(result[0], _WITHOUT_FOLDERS)


def read_or_damaged(run_id: str, read: Callable[[], T]) -> T:
    """What ``read`` gives. Raises StoreError where it meets values that nothing of ampscope
    writes."""
    try:
        return read()
    except AmpscopeError:
        raise
    except Exception as error:
        logger.exception("What the store holds of run %s could not be read", run_id)
        raise StoreError(
            f"What the store holds of this run is damaged ({type(error).__name__}: {error})."
        ) from error


def drawn(info: RunInfo, name: str, draw: Callable[[], go.Figure]) -> go.Figure:
    """The figure ``name`` of this version, built once for all browsers; no caller may change it."""
    permissions.require(permissions.may_see(info), "this run")
    return _drawn(str(path()), info.id, version(info), name, draw)


@st.cache_resource(show_spinner=False, max_entries=MAX_FIGURES)
def _drawn(
    store: str, run_id: str, version: str, name: str, _draw: Callable[[], go.Figure]
) -> go.Figure:
    return _draw()


@of_run
def steps(
    reader: Reader,
    run_id: str,
    first: int | None = None,
    last: int | None = None,
    points: int = POINTS,
) -> list[StepRecord]:
    """In order: all where they are few, else real ones that stand for them (Reader.overview)."""
    return reader.overview(run_id, points, first, last)


# What the reader gives of one run, each for the users who may see it: see :class:`Reader`.
totals = of_run(Reader.step_totals)
events = of_run(Reader.events)
modules = of_run(Reader.modules)
ops = of_run(Reader.ops)
frame_spans = of_run(Reader.frame_spans)
frame_steps = of_run(Reader.frame_steps)
frame = of_run(Reader.frame)
shadows = of_run(Reader.shadows)
nonfinite = of_run(Reader.nonfinite)
results = of_run(Reader.results)
samples = of_run(Reader.samples)


def visible_newest(path: Path, limit: int) -> tuple[RunInfo, ...]:
    """Newest first."""
    if permissions.is_trusted():
        return run_rows.newest(path, limit)
    return _shown(permissions.visible(run_rows.newest(path, max(limit, FAR)))[:limit])


def visible_one(path: Path, run_id: str) -> RunInfo:
    """Raises BadInput when there is no such run, and likewise when it may not be seen: also by the
    beginning of an id no user learns that it exists."""
    if permissions.is_trusted():
        return run_rows.one(path, run_id)
    found = [run for run in visible_newest(path, FAR) if run_id and run.id.startswith(run_id)]
    if len(found) != 1:
        with contextlib.suppress(BadInput):  # an older one, by its whole id
            found = [r for r in permissions.visible([run_rows.one(path, run_id)]) if r.id == run_id]
    if len(found) != 1:
        raise BadInput(f"Run {run_id!r} is not here, or is not shown to the class.")
    return _shown(found)[0]


def visible_group(path: Path, name: str) -> tuple[RunInfo, ...]:
    """Runs that were started together, oldest first."""
    return _shown(permissions.visible(run_rows.group(path, name)))


def _shown(runs: Sequence[RunInfo]) -> tuple[RunInfo, ...]:
    """Students see neither a script's arguments nor folders of the machine that it ran on. The
    scripts that come with a lesson lie where ampscope does; pages show their names alone."""
    if permissions.is_trusted():
        return tuple(runs)
    return tuple(run if permissions.is_of_lesson(run) else _without_folders(run) for run in runs)


def _without_folders(run: RunInfo) -> RunInfo:
    name = PurePath(run.spec.workload).name
    spec = replace(run.spec, workload=name, args=(), label=without_folders(run.spec.label))
    message, traceback = without_folders(run.message), without_folders(run.traceback)
    return replace(run, spec=spec, message=message, traceback=traceback)
