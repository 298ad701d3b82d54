"""The rows of the runs that whoever looks may see: :mod:`app.run_rows` behind the permissions."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ampscope.errors import BadInput
from ampscope.records import RunInfo
from app import permissions, run_rows

FAR = 4_000  # how far back a student's list looks for shared runs among the teacher's own


def newest(path: Path, limit: int) -> tuple[RunInfo, ...]:
    """Newest first."""
    if permissions.is_trusted():
        return run_rows.newest(path, limit)
    return permissions.visible(run_rows.newest(path, max(limit, FAR)))[:limit]


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
    return found[0]


def group(path: Path, name: str) -> tuple[RunInfo, ...]:
    """Runs that were started together, oldest first."""
    return permissions.visible(run_rows.group(path, name))
