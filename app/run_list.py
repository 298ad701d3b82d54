"""The page Runs: every entry of the store with its state and links to its pages, found by words and
by what it is; its rows, which Home shows as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from ampscope.analysis.ranks import grouped, is_rank
from ampscope.causes import CAUSES
from ampscope.number_words import plural
from ampscope.records import Event, RunInfo, State, StepTotals
from ampscope.store.processes import whose
from ampscope.store.reader import Reader, StoredVerdict
from ampscope.story.run_words import file_name, rules
from app import links, permissions, run_rows, states, store
from app.runs import actions, diagnoses, run_page
from app.text import ago, cut, escape

AT_FIRST = 10
REASON_LENGTH = 240  # three lines beside the links
ANY = "any"
KINDS = {  # what may be asked for, and the runs that it stands for
    ANY: (),
    "diagnoses": ("script",),
    "watched trainings": ("watch",),
    "probes": ("probe",),
    "measurements": ("bench", "cores", "compare", "batch"),
}
UNSTORED = "no stored verdict"
WORDS = {"no_fault": "no fault", "inconclusive": "undetermined"}  # of a stored verdict
VERDICTS = (  # in the order of need; a page offers those that occur
    "fault", "alarm", "latent", "undetermined", "could not run", "failed", "lost", "running",
    "queued", "no fault", "no alarm", "finished", "cancelled", UNSTORED,
)  # fmt: skip
DAY_S = 24 * 3600.0
AGES = {ANY: math.inf, "a day": DAY_S, "a week": 7 * DAY_S, "a month": 30 * DAY_S}  # at most
_SHOWN = "recent-shown"
_FILTER_PX = 168  # two beside each other on a phone


Entry = tuple[RunInfo, ...]  # runs that are shown as one; the first stands for all


def show_all() -> None:
    """The page Runs: what is looked for, then the rows, ten at a time; follows what moves."""
    every = listed()
    if not every:
        states.empty_store()
        return
    words = links.find("search", "name, file, state, precision, verdict, cause")
    occurring = {word for one in every for word in one.verdicts}
    scripts = list(dict.fromkeys(one.script for one in every if one.script))
    with st.container(horizontal=True, vertical_alignment="bottom"):
        asked = RunFilter(
            tuple(words.lower().split()),
            _filter("Kind", "kind", list(KINDS)),
            _filter("Verdict", "verdict", [ANY, *(v for v in VERDICTS if v in occurring)]),
            _filter("Script or model", "script", [ANY, *scripts]),
            _filter("Age up to", "age", list(AGES)),
        )
        if permissions.is_trusted():
            with st.popover("Delete runs"):
                _delete()
    is_moving = any(run.state.is_active for one in every for run in one.entry)
    is_moving = is_moving or any("running" in one.verdicts for one in every)
    follow_every = run_page.FOLLOW_EVERY_S if is_moving else None
    st.fragment(_found_rows, run_every=follow_every)(asked)


def _filter(label: str, name: str, options: Sequence[str]) -> str:
    return links.select(label, name, options, writes_default=False, width=_FILTER_PX)


def _delete() -> None:
    """Choose, read what it means, confirm."""
    ended = {run.id: run for run in store.runs(diagnoses.RUNS_READ) if not run.state.is_active}
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
        actions.delete(chosen)
        st.rerun()


@dataclass(frozen=True, slots=True)
class RunFilter:
    """What the page Runs is asked for."""

    words: tuple[str, ...]
    kind: str = ANY
    verdict: str = ANY
    script: str = ANY
    age: str = ANY

    def fits(self, one: ListedEntry, now: float) -> bool:
        """Whether an entry is to be shown."""
        run, kinds = one.entry[0], KINDS[self.kind]
        return (
            now - run.created <= AGES[self.age]
            and (not kinds or run.spec.kind in kinds)
            and self.verdict in (ANY, *one.verdicts)
            and self.script in (ANY, one.script)
            and (not self.words or all(word in one.text for word in self.words))
        )


def _found_rows(asked: RunFilter) -> None:
    now, every = time.time(), listed()
    found = [one for one in every if asked.fits(one, now)]
    text = f"{plural(len(found), 'entry', 'entries')}, newest first."
    unstored = sum(UNSTORED in one.verdicts for one in every)
    if unstored and asked.verdict not in (ANY, UNSTORED):
        text += (
            f" {plural(unstored, 'diagnosis', 'diagnoses')} not looked through: no verdict of "
            "theirs is stored."
        )
    st.caption(text)
    shown = st.session_state.setdefault(_SHOWN, AT_FIRST)
    rows([one.entry for one in found[:shown]])
    if len(found) > shown and st.button(f"Show {min(AT_FIRST, len(found) - shown)} older"):
        st.session_state[_SHOWN] = shown + AT_FIRST
        st.rerun()


def listed() -> list[ListedEntry]:
    """All entries, newest first."""
    runs = listed_runs()
    if not runs:  # there may be no store yet
        return []
    stored, alarmed = run_rows.verdicts(store.path()), run_rows.with_alarms(store.path())
    moving = {r.spec.group or r.id for r in runs if is_script(r) and r.state.is_active}
    found = []
    for entry in entries(runs):
        run, concluded = entry[0], stored.get(entry[0].id)
        words = {str(r.state) for r in entry}
        if run.spec.kind == "watch":
            words.add("alarm" if any(r.id in alarmed for r in entry) else "no alarm")
        elif is_script(run):
            words = {_verdict_word(concluded)}
            if (run.spec.group or run.id) in moving:
                words = {"running"}
        cause = CAUSES.get(concluded.cause or concluded.latent) if concluded else None
        titled = f"{cause.code} {cause.title}" if cause else ""
        name = file_name(run.spec.workload) if run.spec.workload else ""
        found.append(ListedEntry(entry, name, frozenset(words), titled))
    return found


def listed_runs() -> list[RunInfo]:
    """All but the measurements of lessons, which their pages find by themselves."""
    return [run for run in store.runs(diagnoses.RUNS_READ) if run.spec.kind != "lesson"]


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


@dataclass(frozen=True, slots=True)
class ListedEntry:
    """An entry with what it can be found by, without reading what its runs recorded."""

    entry: Entry
    script: str  # file name of the script, or the built-in model
    verdicts: frozenset[str]  # of :data:`VERDICTS`
    cause: str  # code and title of the root cause; "" where none is known

    @property
    def text(self) -> str:
        """What words are looked for in."""
        run = self.entry[0]
        named = (run_page.name_of(run), run_page.described(run), run.spec.kind, run.id, self.cause)
        modes = (f"{r.state} {r.spec.mode}" for r in self.entry)
        return " ".join([*named, self.script, *sorted(self.verdicts), *modes]).lower()


def _verdict_word(concluded: StoredVerdict | None) -> str:
    """As the badge of a diagnosis says it (:attr:`app.runs.diagnoses.DiagnosisCase.verdict`)."""
    if concluded is None:
        return UNSTORED
    if concluded.could_not_run:
        return "could not run"
    if concluded.latent and concluded.word == "no_fault":
        return "latent"
    return WORDS.get(concluded.word, concluded.word)


def rows(some: Sequence[Entry]) -> None:
    """One row for each."""
    scripts = diagnoses.recorded_runs() if any(is_script(entry[0]) for entry in some) else []
    for entry in some:
        with states.contained():  # one run never hides the others
            _row(entry, scripts)


def _row(entry: Entry, scripts: Sequence[RunInfo]) -> None:
    run = entry[0]
    with st.container(border=True):
        what, pages = st.columns([6, 4], vertical_alignment="center")
        with what.container(gap="xxsmall"):
            verdict = watched(entry).verdict if run.spec.kind == "watch" else None
            case = diagnoses.read_case(run, scripts) if is_script(run) else None
            verdict = verdict if case is None else case.verdict
            run_page.title_line(run, () if is_rank(run) else entry[1:], verdict)
            if case is not None and case.report is not None and case.report.diagnosis.findings:
                root = CAUSES[case.report.diagnosis.findings[0].cause]
                st.markdown(escape(f"{root.title} ({root.code})"))
            st.caption(escape(" · ".join(_facts(entry))))
            why_ended(entry)
            for one in entry:
                going_on(one)
        with pages.container(horizontal=True, horizontal_alignment="right"):
            name = "run" if run.spec.is_training else run.spec.kind
            if (page := _page(run)) is not None:
                links.link(page, f"Open {page.title}", **{name: run.id})


def _page(run: RunInfo) -> links.Entry | None:
    """The page that answers first; the others of a run are its tabs."""
    if not run.spec.is_training:
        return links.MEASUREMENT_PAGES.get(run.spec.kind)
    return next(iter(run_page.pages_of(run)), None)


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


def why_ended(entry: Entry) -> None:
    """Why a run failed or was lost, in its own words."""
    for run in entry:
        if run.state in (State.FAILED, State.LOST) and run.message:
            rank = f"Rank {run.spec.rank} {run.state}: " if is_rank(run) else ""
            st.markdown(f":red[{escape(rank + cut(run.message, REASON_LENGTH))}]")


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
            # A diagnosis is one thing of several runs; the precisions of a probe are not.
            together = store.group(run.spec.group) if run.spec.kind == "script" else []
            for one in together or [run]:
                if one.state.is_active:
                    actions.cancel_run(one)
            st.rerun()


def watched(entry: Entry) -> WatchedState:
    """Read of the store, of all ranks."""
    alarms = [(event, rank) for rank in entry for event in _alarms(rank)]
    return WatchedState(
        tuple(sorted(alarms, key=lambda pair: pair[0].step)),
        tuple(store.totals(rank) for rank in entry),
        next((r.state for r in entry if r.state in (State.FAILED, State.LOST)), None),
    )


@dataclass(frozen=True, slots=True)
class WatchedState:
    """How a watched training stands, all ranks together."""

    alarms: tuple[tuple[Event, RunInfo], ...]  # in the order of steps, each with its rank
    totals: tuple[StepTotals, ...]  # of each rank
    ended: State | None  # failed or lost, where a rank was

    @property
    def is_bad(self) -> bool:
        """The newest step is not finite, and no scaler skipped it: a skip is how a scaler searches
        and says nothing bad."""
        return any(t.bad > t.skipped and t.last_bad == t.last_step for t in self.totals)

    @property
    def verdict(self) -> tuple[str, states.BadgeColor]:
        """In a word or two, with a badge's colour."""
        if self.alarms:
            step = self.alarms[0][0].step
            return f"alarm at step {step:,}", states.BADGE_COLORS[State.FAILED]
        if self.ended is not None:
            return str(self.ended), states.BADGE_COLORS[self.ended]
        if self.is_bad:
            return "not finite", states.BADGE_COLORS[State.LOST]
        return "healthy", states.BADGE_COLORS[State.FINISHED]


@store.of_run
def _alarms(reader: Reader, run_id: str) -> list[Event]:
    """Of a watched training, in order."""
    return [event for event in reader.events(run_id) if event.kind == "alarm"]


def is_script(run: RunInfo) -> bool:
    """Whether the run is one of a diagnosis, or of ``ampscope run``."""
    return run.spec.kind == "script"
