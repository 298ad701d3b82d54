"""A group of probes while they run: progress, place in the queue, live curves, cancel.

    actions.show_progress(group, key="new")   # redraws itself every second until all have ended

Starting, stopping, deleting and sharing runs is done here too: the dashboard's only writes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope.launcher.launch import checked, launch
from ampscope.records import RunInfo, RunSpec, State, StepRecord
from ampscope.store import sharing, writer
from app import chart, links, permissions, states, store
from app.figures.training import progress_figure
from app.text import duration, escape, number, plural

REFRESH_EVERY_S = 1.0


def show_progress(group: str, *, key: str) -> list[RunInfo]:
    """Draw the group; returns its runs as they are now (empty when there is no such group)."""
    runs = of_group(group)
    if any(run.state.is_active for run in runs):
        _refreshing(group, key)
    elif runs:
        _draw(runs, key)
    return runs


@st.fragment(run_every=REFRESH_EVERY_S)
def _refreshing(group: str, key: str) -> None:
    runs = of_group(group)
    if not any(run.state.is_active for run in runs):
        st.rerun(scope="app")  # ended: the page goes on, and this clock stops
    _draw(runs, key)


def _draw(runs: list[RunInfo], key: str) -> None:
    is_device_taken = any(run.state is State.RUNNING for run in store.runs())
    for run in runs:
        _row(run, key, is_device_taken)
    recorded = [(run, store.steps(run)) for run in runs]
    if any(steps for _, steps in recorded):
        st.markdown(escape(_what_to_see(recorded)))
        chart.show(
            progress_figure(recorded),
            "progress",
            lambda: _table(recorded),
            key=f"{key}-progress",
        )


def _row(run: RunInfo, key: str, is_device_taken: bool) -> None:
    name, progress, action = st.columns([3, 5, 2], vertical_alignment="center")
    with name.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown(f"**{escape(run.spec.mode)}**", width="content")
        st.badge(run.state, color=states.BADGE_COLORS[run.state])
    done = min(1.0, run.steps_done / max(1, run.spec.steps))  # an import may say 0
    progress.progress(done, text=_progress_text(run, is_device_taken))
    if run.state.is_active:
        _cancel_button(action, run, key)
        return
    if run.steps_done:
        action.page_link(links.LAYERS.file, label="Open", query_params={"run": run.id})
    states.explain(run)


def _cancel_button(place: DeltaGenerator, run: RunInfo, key: str) -> None:
    if not permissions.is_trusted():
        return
    asked = f"{key}-cancelled-{run.id}"
    is_asked = bool(st.session_state.get(asked))

    def cancel() -> None:
        cancel_run(run)
        st.session_state[asked] = True

    place.button(
        "Stopping" if is_asked else "Cancel",
        key=f"{key}-cancel-{run.id}",
        on_click=cancel,
        disabled=is_asked,
        width="stretch",
    )


def _progress_text(run: RunInfo, is_device_taken: bool) -> str:
    if run.state is State.QUEUED:
        waits = run.place > 1 or is_device_taken
        return f"Waits, place {run.place} in the queue" if waits else "Starting"
    done = f"{run.steps_done:,} of {plural(run.spec.steps, 'step')}"
    if run.started is None:
        return done
    end = run.ended or run.heartbeat or run.started
    return f"{done}, {duration(max(0.0, end - run.started))}"


def _what_to_see(recorded: list[tuple[RunInfo, list[StepRecord]]]) -> str:
    """The last loss of each run, side by side."""
    parts = [
        f"{run.spec.mode} {number(steps[-1].loss)} (step {steps[-1].step})"
        for run, steps in recorded
        if steps
    ]
    skips = sum(store.totals(run).skipped for run, _ in recorded)
    tail = f" GradScaler has left out {plural(skips, 'step')}." if skips else ""
    return f"Loss so far: {'; '.join(parts)}.{tail}"


def _table(recorded: list[tuple[RunInfo, list[StepRecord]]]) -> pd.DataFrame:
    rows = [
        (run.id, run.spec.mode, s.step, s.loss, s.scale, s.skipped)
        for run, steps in recorded
        for s in steps
    ]
    columns = ["run", "precision", "step", "loss", "loss_scale", "skipped"]
    return pd.DataFrame(rows, columns=columns)


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


def cancel_run(run: RunInfo) -> None:
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
