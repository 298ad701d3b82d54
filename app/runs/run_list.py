"""Recorded runs as rows: state, name, what it was, links to its pages; found by words and kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from ampscope.analysis.ranks import grouped, is_rank
from ampscope.records import RunInfo, State
from ampscope.report.run_words import rules
from ampscope.store.processes import whose
from app import links, permissions, run_rows, states, store
from app.runs import diagnoses, live, run_page
from app.text import ago, cut, escape, plural

AT_FIRST = 10
MOST_READ = 2_000
REASON_LENGTH = 240  # three lines beside the links
KINDS = {  # what may be asked for, and the runs that it stands for
    "all": (),
    "diagnoses": ("script",),
    "watched trainings": ("watch",),
    "probes": ("probe",),
    "measurements": ("bench", "cores", "compare", "batch"),
}
Entry = tuple[RunInfo, ...]  # runs that are shown as one; the first stands for all
_SHOWN = "recent-shown"


def listed_runs() -> list[RunInfo]:
    """All but the measurements of lessons, which their pages find by themselves."""
    return [run for run in store.runs(MOST_READ) if run.spec.kind != "lesson"]


def entries(runs: Sequence[RunInfo]) -> list[Entry]:
    """Newest first: of the runs of one diagnosis the one that stands for all; the ranks of one
    training together, and the probes that were started together."""
    heads = {run.id for run in diagnoses.group_heads([r for r in runs if is_script(r)])}
    found: dict[str, list[RunInfo]] = {}
    for ranks in grouped([run for run in runs if not is_script(run) or run.id in heads]):
        first = ranks[0].spec
        together = first.group if first.kind == "probe" else ""
        found.setdefault(together or ranks[0].id, []).extend(ranks)
    return [tuple(sorted(some, key=lambda r: r.created)) for some in found.values()]


def show_all() -> None:
    """The page Runs: what is looked for, then the rows, ten at a time; follows what moves."""
    runs = listed_runs()
    if not runs:
        states.empty_store()
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        words = links.find("find", "name, file, state, precision, verdict")
        kind = links.pick("Kind", "kind", list(KINDS))
        if permissions.is_trusted():
            with st.popover("Delete runs"):
                _delete()
    is_moving = any(run.state.is_active for run in runs)
    every = run_page.FOLLOW_EVERY_S if is_moving else None
    st.fragment(_found_rows, run_every=every)(words, kind)


def _found_rows(words: str, kind: str) -> None:
    verdicts = run_rows.verdicts(store.path())
    asked = words.lower().split()
    found = [e for e in entries(listed_runs()) if _is_of(e, asked, KINDS[kind], verdicts)]
    st.caption(f"{plural(len(found), 'entry', 'entries')}, newest first.")
    shown = st.session_state.setdefault(_SHOWN, AT_FIRST)
    rows(found[:shown])
    if len(found) > shown and st.button(f"Show {min(AT_FIRST, len(found) - shown)} older"):
        st.session_state[_SHOWN] = shown + AT_FIRST
        st.rerun()


def _is_of(
    entry: Entry, words: Sequence[str], kinds: Sequence[str], verdicts: Mapping[str, str]
) -> bool:
    run = entry[0]
    if kinds and run.spec.kind not in kinds:
        return False
    verdict = verdicts.get(run.id, "").replace("_", " ")
    told = (run_page.name_of(run), run_page.described(run), run.spec.kind, run.id, verdict)
    text = " ".join([*told, *(f"{r.state} {r.spec.mode}" for r in entry)]).lower()
    return all(word in text for word in words)


def rows(some: Sequence[Entry]) -> None:
    """One row for each."""
    scripts = diagnoses.recorded_runs() if any(is_script(entry[0]) for entry in some) else []
    for entry in some:
        with states.part():  # one run never hides the others
            _row(entry, scripts)


def _row(entry: Entry, scripts: Sequence[RunInfo]) -> None:
    run = entry[0]
    with st.container(border=True):
        what, pages = st.columns([6, 4], vertical_alignment="center")
        with what.container(gap="xxsmall"):
            verdict = diagnoses.read_case(run, scripts).verdict if is_script(run) else None
            run_page.title_line(run, () if is_rank(run) else entry[1:], verdict)
            st.caption(escape(" · ".join(_facts(entry))))
            _ended(entry)
            for one in entry:
                going_on(one)
        with pages.container(horizontal=True, horizontal_alignment="right"):
            name = "run" if run.spec.is_training else run.spec.kind
            for page in _pages(run):
                st.page_link(page.file, label=page.title, query_params={name: run.id})


def _pages(run: RunInfo) -> Sequence[links.Entry]:
    if run.spec.is_training:
        return run_page.pages_of(run)
    return (links.MEASUREMENT_PAGES[run.spec.kind],)


def going_on(run: RunInfo) -> None:
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


def _ended(entry: Entry) -> None:
    """Why a run failed or was lost, in its own words."""
    for run in entry:
        if run.state in (State.FAILED, State.LOST) and run.message:
            rank = f"Rank {run.spec.rank} {run.state}: " if is_rank(run) else ""
            st.markdown(f":red[{escape(rank + cut(run.message, REASON_LENGTH))}]")


def _facts(entry: Entry) -> list[str]:
    run = entry[0]
    policy = rules(run)
    if is_script(run):
        return [policy, plural(run.steps_done, "step"), ago(run.created)]
    what = [run_page.described(run)] if run.spec.label else []
    if run.spec.kind == "watch":
        world = [run_page.world_words(entry)] if is_rank(run) else []
        steps = plural(max(r.steps_done for r in entry), "step")
        so_far = f"{steps} so far" if any(r.state.is_active for r in entry) else steps
        return [*what, *world, policy, so_far, ago(run.created)]
    place = [f"place {run.place} in the queue"] if run.place else []
    if not run.spec.is_training:
        return [*what, policy, *place, plural(run.steps_done, "result"), ago(run.created)]
    if entry[1:]:
        what = [", ".join(r.spec.mode for r in entry)]
    steps = f"{sum(r.steps_done for r in entry):,}"
    total = plural(sum(r.spec.steps for r in entry), "step")
    return [*what, policy, *place, f"{steps} of {total}", ago(run.created)]


def is_script(run: RunInfo) -> bool:
    """Whether the run is one of a diagnosis, or of ``ampscope run``."""
    return run.spec.kind == "script"


def _delete() -> None:
    """Choose, read what it means, confirm."""
    ended = {run.id: run for run in store.runs(MOST_READ) if not run.state.is_active}
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
