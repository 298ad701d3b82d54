"""The list of recent runs on Home: state, name, what it was, links to its pages, deletion."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.ranks import grouped, is_rank
from ampscope.records import RunInfo, State
from ampscope.report.words.run import rules
from ampscope.store.processes import whose
from app import permissions, sitemap, states, store
from app.diagnosis import diagnosis_data
from app.runs import probes, run_page, trainings
from app.text import ago, cut, escape, plural

AT_FIRST = 10
REASON_LENGTH = 240  # three lines beside the links
_SHOWN = "recent-shown"


def listed() -> list[RunInfo]:
    """All but the measurements of lessons, which their pages find by themselves."""
    return [run for run in store.runs() if run.spec.kind != "lesson"]


def show(runs: list[RunInfo]) -> None:
    """Newest first, ten at a time; follows the runs that are under way."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.subheader("Recent runs", anchor=False)
        if permissions.is_trusted():
            with st.popover("Delete runs"):
                _delete()
    is_moving = any(run.state.is_active for run in runs)
    st.fragment(_rows, run_every=run_page.FOLLOW_EVERY_S if is_moving else None)()


def _rows() -> None:
    runs = listed()
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
    heads = {run.id for run in diagnosis_data.heads([r for r in runs if _is_script(r)])}
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
                    probes.cancel(one)
            st.rerun()


def _pages(run: RunInfo) -> tuple[sitemap.Entry, ...]:
    if not run.spec.is_training:
        return (sitemap.MEASUREMENT_PAGES[run.spec.kind],)
    if run.spec.kind == "watch":
        return sitemap.WATCHED_PAGES
    return ((sitemap.DIAGNOSIS,) if _is_script(run) else ()) + sitemap.RUN_PAGES


def _ended(ranks: tuple[RunInfo, ...]) -> None:
    """Why a run failed or was lost, in its own words."""
    for run in ranks:
        if run.state in (State.FAILED, State.LOST) and run.message:
            rank = f"Rank {run.spec.rank} {run.state}: " if is_rank(run) else ""
            st.markdown(f":red[{escape(rank + cut(run.message, REASON_LENGTH))}]")


def _facts(ranks: tuple[RunInfo, ...], group_size: int) -> list[str]:
    run = ranks[0]
    policy = rules(run.machine)
    if _is_script(run):
        others = group_size - 1 if run.spec.group else 0
        beside = [f"{plural(others, 'control run')} beside it"] if others else []
        return [policy, plural(run.steps_done, "step"), *beside, ago(run.created)]
    what = [run_page.described(run)] if run.spec.label else []
    if run.spec.kind == "watch":
        world = [trainings.world_words(ranks)] if is_rank(run) else []
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
        probes.delete(chosen)
        st.rerun()
