"""What this session asks of the class's queue; one queue for each store of this server."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

from streamlit.runtime.scriptrunner import get_script_run_ctx

from ampscope.experiments.launch import launch
from ampscope.hardware.software import read_software
from ampscope.lessons.catalog import LESSONS, lesson_spec
from ampscope.records import RunInfo, RunSpec, State
from ampscope.store import sharing
from app import options, permissions, store
from app.classes.class_queue import ClassQueue
from app.permissions import Role

_making = threading.Lock()


def is_class() -> bool:
    """Whether measurements go through the queue."""
    return options.current().classroom is not None


def ask(spec: RunSpec, *, again: bool = False) -> str:
    """The run that answers ``spec``, or "" while it waits. Raises Full, Forbidden."""
    permissions.require(permissions.may_run(spec), "starting this measurement")
    permissions.require(not again or permissions.is_trusted(), "measuring again")
    is_teacher = permissions.role() is Role.TEACHER
    return queue().ask(spec, _session(), teacher=is_teacher, again=again)


def prepare() -> int:
    """Ask for what every lesson shows first, as the teacher does before a class; how many are not
    there yet."""
    permissions.require(permissions.is_trusted(), "preparing the lessons")
    specs = [lesson_spec(one.id) for one in LESSONS.values() if one.is_measured]
    return sum(not queue().ask(s, "preparation", teacher=True, kept=True) for s in specs)


def withdraw(spec: RunSpec) -> None:
    """Take a request out of the queue, whoever waits for it."""
    permissions.require(permissions.is_trusted(), "withdrawing a request")
    queue().withdraw(spec)


def queue() -> ClassQueue:
    """Of this store."""
    with _making:
        return _queue(store.path())


def answering(runs: Iterable[RunInfo]) -> list[RunInfo]:
    """Those by the installed torch; those that wait have no torch yet."""
    return [run for run in runs if run.machine is None or run.machine.torch == _torch()]


@cache
def _queue(path: Path) -> ClassQueue:
    return ClassQueue(
        find=partial(_known, path),
        launch=lambda spec: launch(spec, path),
        is_free=lambda: not any(_occupies(run) for run in sharing.active(path)),
    )


def _known(path: Path, spec: RunSpec) -> str:
    """A run that is under way, else a finished one, else the newest: it says why it failed."""
    runs = answering(sharing.of_spec(path, spec))
    good = (run for run in runs if run.state.is_active or run.state is State.FINISHED)
    return next((run.id for run in good), runs[0].id if runs else "")


def _occupies(run: RunInfo) -> bool:
    """A watched training may last for days, and on another machine."""
    return run.spec.kind != "watch"


def _session() -> str:
    context = get_script_run_ctx(suppress_warning=True)
    return context.session_id if context else ""


@cache
def _torch() -> str | None:
    return read_software().torch
