"""The page Home: the demo, and the list of recent runs."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.ranks import grouped, is_rank
from ampscope.records import Cadence, RunInfo, RunSpec, State
from ampscope.report.run_words import rules
from ampscope.store.processes import whose
from app import links, permissions, states, store
from app.runs import diagnoses, live, run_page
from app.text import ago, cut, escape, plural

# The demo: one small GPT with a small loss, three times: fp16 without a scaler loses gradients,
# fp16 with one does not, and fp32 shows what they should have been.


STEPS = 20
LAST_SHADOW = (STEPS - 1) // Cadence().shadow * Cadence().shadow  # where lost values are known
# Measured on GPT tiny: at step 10 fp16 then loses 89 % of the output gradients without a scaler and
# 5 % with one, and at step 15 the loss (over the factor) is 3.59 without, 3.03 with, 3.04 in fp32.
# At 2^-8 as many gradients go, but Adam makes up for it and the loss curves look alike.
LOSS_FACTOR = 2.0**-11
PRECISIONS = ("fp16-noscaler", "fp16", "fp32")
GROUP = "demo"  # the URL's name for the demo's group
_OPENS = "demo-opens"  # session key: this session started the demo and waits for its result


def invited_specs() -> list[RunSpec]:
    """The worst first: its result is what opens."""
    return [
        RunSpec(
            workload="gpt",
            size="tiny",
            precision=precision,
            steps=STEPS,
            loss_factor=LOSS_FACTOR,
            label=f"Demo, {precision}",
        )
        for precision in PRECISIONS
    ]


def invite() -> None:
    """The one button of an empty store."""
    if not permissions.offers("starting the demo"):
        return
    with st.container(border=True):
        st.subheader("See what half precision does to a training", anchor=False)
        st.markdown(
            "The demo trains a small GPT three times, in fp16 without a loss scaler, in fp16 with "
            "one, and in fp32, and opens the gradients that fp16 lost. It takes about 20 seconds."
        )
        if st.button("Run the demo", type="primary", key="run-demo"):
            links.keep(GROUP, live.start(invited_specs()))
            st.session_state[_OPENS] = True
            st.rerun()
    st.page_link(links.NEW_PROBE.file, label="Or set up a probe of your own")


def follow() -> bool:
    """Progress of the demo that the URL names; opens its result once. True while it runs."""
    group = links.wanted(GROUP)
    runs = live.of_group(group) if group else []
    if not runs:
        return False
    st.subheader("Demo", anchor=False)
    live.show_progress(group, key="demo")
    has_ended = all(run.state is State.FINISHED for run in runs)
    if has_ended and st.session_state.pop(_OPENS, False):
        links.keep(GROUP, None)
        result = {"run": runs[0].id, "role": "grad_output", "step": str(LAST_SHADOW)}
        st.switch_page(links.GRADIENTS.file, query_params=result)
    return any(run.state.is_active for run in runs)


# The list of recent runs on Home: state, name, what it was, links to its pages, deletion.


AT_FIRST = 10
REASON_LENGTH = 240  # three lines beside the links
_SHOWN = "recent-shown"


def listed_runs() -> list[RunInfo]:
    """All but the measurements of lessons, which their pages find by themselves."""
    return [run for run in store.runs() if run.spec.kind != "lesson"]


def show_newest(runs: list[RunInfo]) -> None:
    """Newest first, ten at a time; follows the runs that are under way."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.subheader("Recent runs", anchor=False)
        if permissions.is_trusted():
            with st.popover("Delete runs"):
                _delete()
    is_moving = any(run.state.is_active for run in runs)
    st.fragment(_rows, run_every=run_page.FOLLOW_EVERY_S if is_moving else None)()


def _rows() -> None:
    runs = listed_runs()
    entries = _entries(runs)
    shown = st.session_state.setdefault(_SHOWN, AT_FIRST)
    for ranks in entries[:shown]:
        run = ranks[0]
        with states.part():  # one run never hides the others
            _row(ranks, sum(run.spec.group == other.spec.group for other in runs))
    if len(entries) > shown and st.button(f"Show {min(AT_FIRST, len(entries) - shown)} older"):
        st.session_state[_SHOWN] = shown + AT_FIRST
        st.rerun()


def _entries(runs: list[RunInfo]) -> list[tuple[RunInfo, ...]]:
    """Probes as they are; of the runs of one diagnosis the one that stands for all; the ranks of
    one training together."""
    heads = {run.id for run in diagnoses.group_heads([r for r in runs if _is_script(r)])}
    shown = [run for run in runs if not _is_script(run) or run.id in heads]
    return grouped(shown)


def _row(ranks: tuple[RunInfo, ...], group_size: int) -> None:
    run = ranks[0]
    with st.container(border=True):
        what, links = st.columns([6, 4], vertical_alignment="center")
        with what.container(gap="xxsmall"):
            run_page.title_line(run)
            st.caption(escape(" · ".join(_facts(ranks, group_size))))
            _ended(ranks)
            _going_on(run)
        with links.container(horizontal=True, horizontal_alignment="right"):
            name = "run" if run.spec.is_training else run.spec.kind
            for entry in _pages(run):
                st.page_link(entry.file, label=entry.title, query_params={name: run.id})


def _going_on(run: RunInfo) -> None:
    """Whose process a run is that waits or works, with a button to stop it: its command line may
    have been killed, and it goes on."""
    if not run.state.is_active or run.spec.kind == "watch" or not permissions.is_trusted():
        return
    owner = whose(run.pid)
    with st.container(horizontal=True, vertical_alignment="center"):
        if owner:
            st.caption(escape(f"{owner[0].upper()}{owner[1:]}."))
        if st.button("Stop", key=f"stop-{run.id}"):
            for one in store.group(run.spec.group) or [run]:
                if one.state.is_active:
                    live.cancel_run(one)
            st.rerun()


def _pages(run: RunInfo) -> tuple[links.Entry, ...]:
    if not run.spec.is_training:
        return (links.MEASUREMENT_PAGES[run.spec.kind],)
    if run.spec.kind == "watch":
        return links.WATCHED_PAGES
    return ((links.DIAGNOSIS,) if _is_script(run) else ()) + links.RUN_PAGES


def _ended(ranks: tuple[RunInfo, ...]) -> None:
    """Why a run failed or was lost, in its own words."""
    for run in ranks:
        if run.state in (State.FAILED, State.LOST) and run.message:
            rank = f"Rank {run.spec.rank} {run.state}: " if is_rank(run) else ""
            st.markdown(f":red[{escape(rank + cut(run.message, REASON_LENGTH))}]")


def _facts(ranks: tuple[RunInfo, ...], group_size: int) -> list[str]:
    run = ranks[0]
    policy = rules(run)
    if _is_script(run):
        others = group_size - 1 if run.spec.group else 0
        beside = [f"{plural(others, 'control run')} beside it"] if others else []
        return [policy, plural(run.steps_done, "step"), *beside, ago(run.created)]
    what = [run_page.described(run)] if run.spec.label else []
    if run.spec.kind == "watch":
        world = [run_page.world_words(ranks)] if is_rank(run) else []
        steps = plural(max(r.steps_done for r in ranks), "step")
        so_far = f"{steps} so far" if any(r.state.is_active for r in ranks) else steps
        return [*what, *world, policy, so_far, ago(run.created)]
    place = [f"place {run.place} in the queue"] if run.place else []
    if not run.spec.is_training:
        return [*what, policy, *place, plural(run.steps_done, "result"), ago(run.created)]
    steps = f"{run.steps_done:,} of {plural(run.spec.steps, 'step')}"
    return [*what, policy, *place, steps, ago(run.created)]


def _is_script(run: RunInfo) -> bool:
    return run.spec.kind == "script"


def _delete() -> None:
    """Choose, read what it means, confirm."""
    ended = {run.id: run for run in store.runs() if not run.state.is_active}
    if not ended:
        st.markdown("No run has ended yet. Cancel a run before deleting it.")
        return
    chosen = st.multiselect(
        "Runs to delete",
        list(ended),
        format_func=lambda id_: run_page.label(ended[id_]),
        key="delete-which",
        placeholder="Type to search",
    )
    st.caption("What was recorded of them is deleted from the store. This cannot be undone.")
    label = f"Delete {plural(len(chosen), 'run')}" if chosen else "Delete"
    if st.button(label, type="primary", disabled=not chosen, key="delete-confirm"):
        live.delete(chosen)
        st.rerun()
