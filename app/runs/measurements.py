"""Measurements of the machine on a page: start one, follow it, choose among those that were made.

    run = measurements.open_measurement("bench")     # None while there is none to show

Telemetry beside it is shown folded, and where and when it was made.
"""

from __future__ import annotations

import time
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope.errors import AmpscopeError
from ampscope.hardware.describe import uses_cuda
from ampscope.launcher.launch import checked, launch
from ampscope.records import RunInfo, RunSpec, State
from app import chart, links, permissions, states, store
from app import telemetry as telemetry_view
from app.runs import actions, run_page, workload_choice
from app.runs.workload_choice import WorkloadChoice
from app.text import ago, escape, plural

FOLLOW_EVERY_S = 1.0


def start(spec: RunSpec) -> None:
    """Launch it and show it. Raises BadInput before anything is started when it cannot work,
    Forbidden when it may not be started here."""
    permissions.require(permissions.may_run(spec), "starting measurements")
    links.keep(spec.kind, launch(checked(spec), store.path()))
    st.rerun()


def form(doing: str, size: str) -> tuple[WorkloadChoice, DeltaGenerator, bool] | None:
    """The workload to measure, to begin with GPT in ``size``; a column for everything else; and
    whether this machine has CUDA. None where a user may not do what ``doing`` says."""
    if not permissions.offers(doing):
        return None
    what, how = st.columns(2, gap="large")
    with what:
        choice = workload_choice.pick_workload(RunSpec(workload="gpt", size=size))
    telemetry_view.warn_of_unused_gpu()
    return choice, how, uses_cuda(telemetry_view.machine_report())


def start_with(choice: WorkloadChoice, kind: str, **fields: Any) -> None:
    """Launch a measurement of a workload and show it, or one sentence on what is wrong."""
    try:
        workload = workload_choice.named(choice)
        # A rehearsal of CUDA's rules says nothing about time.
        start(RunSpec(workload=workload, kind=kind, size=choice.size, policy="native", **fields))
    except AmpscopeError as error:
        states.unreadable(str(error))


def of_kind(kind: str) -> list[RunInfo]:
    """This machine's own, newest first; then those of others, which a file brought."""
    found = [run for run in store.runs() if run.spec.kind == kind]
    return sorted(found, key=lambda run: bool(run.spec.imported))


def open_measurement(kind: str) -> RunInfo | None:
    """The measurement that the address names (``?bench=ID``), else the newest, with its state, and
    followed while it runs. None when there is none that has found anything yet."""
    runs = of_kind(kind)
    if not runs:
        return None
    by_id = {run.id: run for run in runs}
    chosen = links.select(
        "Measurement",
        kind,
        list(by_id),
        format_func=lambda id_: _label(by_id[id_]),
        writes_default=False,
    )
    run = by_id[chosen]
    run_page.offer(run)
    _state(run)
    if run.steps_done and not run.state.is_active:
        run_page.offer_report(run)
    return run if run.steps_done else None


def telemetry(run: RunInfo) -> None:
    """What the machine did meanwhile, folded."""
    if run.state is State.FINISHED and store.samples(run):
        with chart.details("What the machine did meanwhile"):
            telemetry_view.show_telemetry(run)


def made_where(run: RunInfo) -> str:
    """Where and when: ``AMD EPYC · torch 2.13.0+cpu · 2026-11-21 14:02 · 3 min ago``."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started or run.created))
    machine = run.machine
    where = [machine.device_name or machine.device, machine.software] if machine else []
    return " · ".join([*where, when, ago(run.created)])


def _label(run: RunInfo) -> str:
    when = time.strftime("%d %b %H:%M:%S", time.localtime(run.created))
    return f"{run_page.name_of(run)} · {run.state} · {when}"


def _state(run: RunInfo) -> None:
    if run.state.is_active:
        _following(run.id)
    elif run.state is not State.FINISHED:
        states.measurement_ended(run)
    elif run.message:
        st.caption(escape(run.message))
    st.caption(escape(made_where(run)))


@st.fragment(run_every=FOLLOW_EVERY_S)
def _following(run_id: str) -> None:
    """Redraws itself; the whole page when more was found or it ended."""
    run = store.run(run_id)
    shown = st.session_state.setdefault(f"measured-{run_id}", store.version(run))
    if not run.state.is_active or store.version(run).split(":")[1] != shown.split(":")[1]:
        st.session_state[f"measured-{run_id}"] = store.version(run)
        st.rerun(scope="app")
    with st.container(horizontal=True, vertical_alignment="center"):
        waits = f"It waits, place {run.place} in the queue."
        so_far = f"It has found {plural(run.steps_done, 'result')} so far."
        text = waits if run.state is State.QUEUED and run.place > 1 else so_far
        st.info(f"**Measuring.** {text}")
        if permissions.is_trusted() and st.button("Cancel", key=f"cancel-{run_id}"):
            actions.cancel_run(run)
            states.nothing_recorded("It stops after what it is measuring now.", "")
