"""Start, stop, delete and share probes: the dashboard's only writes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from ampscope.experiments.launch import launch
from ampscope.experiments.validate import checked
from ampscope.records import RunInfo, RunSpec
from ampscope.store import sharing, writer
from app import permissions, store


def start(specs: Sequence[RunSpec]) -> str:
    """Launch all as one group and return its name; the engine runs them one after another.

    Raises BadInput before anything is started when one of them cannot work, Forbidden when one of
    them may not be started here.
    """
    permissions.require(all(map(permissions.may_run, specs)), "starting probes")
    group = secrets.token_hex(4)
    grouped = [checked(replace(spec, group=group)) for spec in specs]
    for spec in grouped:
        launch(spec, store.path())
    return group


def of_group(group: str) -> list[RunInfo]:
    """The runs of a group in the order in which they were started."""
    return [run for run in reversed(store.runs()) if group and run.spec.group == group]


def cancel(run: RunInfo) -> None:
    """Ask a run to stop; it ends at its next step."""
    permissions.require(permissions.is_trusted(), "stopping a run")
    writer.request_cancel(store.path(), run.id)


def delete(run_ids: Sequence[str]) -> None:
    """Delete runs and all that was recorded of them."""
    permissions.require(permissions.is_trusted(), "deleting runs")
    for run_id in run_ids:
        writer.delete_run(store.path(), run_id)


def share(run: RunInfo, *, wanted: bool) -> None:
    """Show a run to the class, or keep it from it again: of a diagnosis and of a distributed
    training all of its runs."""
    permissions.require(permissions.is_trusted(), "sharing runs")
    is_one_of_several = run.spec.kind in ("script", "watch") and run.spec.group
    runs = store.group(run.spec.group) if is_one_of_several else [run]
    sharing.share(store.path(), [one.id for one in runs], wanted=wanted)
