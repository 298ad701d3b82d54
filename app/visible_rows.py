"""The rows of the runs that whoever looks may see: :mod:`app.run_rows` behind the permissions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from ampscope.errors import BadInput
from ampscope.privacy import without_folders
from ampscope.records import RunInfo
from app import permissions, run_rows

FAR = 4_000  # how far back a student's list looks for shared runs among the teacher's own


def newest(path: Path, limit: int) -> tuple[RunInfo, ...]:
    """Newest first."""
    if permissions.is_trusted():
        return run_rows.newest(path, limit)
    return _shown(permissions.visible(run_rows.newest(path, max(limit, FAR)))[:limit])


def one(path: Path, run_id: str) -> RunInfo:
    """Raises BadInput when there is no such run, and likewise when it may not be seen: also by the
    beginning of an id nobody learns that it is there."""
    if permissions.is_trusted():
        return run_rows.one(path, run_id)
    found = [run for run in newest(path, FAR) if run_id and run.id.startswith(run_id)]
    if len(found) != 1:
        with contextlib.suppress(BadInput):  # an older one, by its whole id
            found = [r for r in permissions.visible([run_rows.one(path, run_id)]) if r.id == run_id]
    if len(found) != 1:
        raise BadInput(f"Run {run_id!r} is not here, or is not shown to the class.")
    return _shown(found)[0]


def group(path: Path, name: str) -> tuple[RunInfo, ...]:
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
