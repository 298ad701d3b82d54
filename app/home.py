"""The pages Home (three ways in, the newest verdicts with what to do, the demo) and Runs."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from ampscope.analysis.ranks import grouped, is_rank
from ampscope.causes import CAUSES
from ampscope.control import Control
from ampscope.number_words import plural
from ampscope.records import Cadence, Event, RunInfo, RunSpec, State, StepTotals
from ampscope.store.db import default_path
from ampscope.store.processes import whose
from ampscope.store.reader import Reader, StoredVerdict
from ampscope.story import fix_words
from ampscope.story import verdict_words as words
from ampscope.story.run_words import file_name, rules
from ampscope.story.training_words import ALARM_NAMES
from app import links, options, permissions, run_rows, states, store, zoo
from app.runs import diagnoses, live, run_page
from app.text import ago, cut, escape
from app.training import alarm_text

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


# Three ways in, always: each names a question, and has a page, a command, or a button that shows it
# at work.


SHOWN_CASE = "c04_vae_decoder.py"  # diagnosed and cured in 9 s, of the zoo's quickest


def show_doors(*, is_empty: bool, ask_lesson: Callable[[int], None]) -> None:
    """``is_empty``: nothing is recorded yet, and each door offers something to see. ``ask_lesson``
    notes that the reader asks for a lesson's measurement."""
    may_start = is_empty and permissions.is_trusted()
    diverged, half, learn = st.columns(3, border=True)
    with diverged:
        st.markdown("**My training diverged or stopped learning**")
        st.markdown("Diagnose the unchanged script: the cause, the line, and a fix that was run.")
        _command("diagnose", " train.py")
        label = "Diagnose a script" if permissions.is_trusted() else "Diagnoses"
        links.link(links.DIAGNOSIS, label)
        if may_start:
            _real_failure()
    with half:
        st.markdown("**What does half precision do to a model?**")
        st.markdown("Record a short training: dtypes, gradients, the loss scale, step by step.")
        _command("probe", " gpt --precision fp16")
        if may_start:
            _demo()
        else:
            links.link(links.NEW_PROBE if permissions.is_trusted() else links.RUNS)
    with learn:
        st.markdown("**Learn mixed precision**")
        st.markdown(
            "Lessons that measure on this machine: predict, run, and compare; for yourself, or as "
            "the teacher of a class."
        )
        if permissions.is_trusted():
            st.code("ampscope dashboard --classroom", language="bash", wrap_lines=True)
        if is_empty:
            _lesson(ask_lesson)
        else:
            links.link(links.LESSON_ENTRIES[1], f"Lesson {links.LESSON_ENTRIES[1].title}")
        links.link(links.LEARN, "All lessons")


def _command(first: str, rest: str) -> None:
    """In a terminal where the training runs: ``ampscope``, its command and store, the rest."""
    if permissions.is_trusted():
        elsewhere = options.current().store != default_path()
        where = f" --store {shlex.quote(str(store.path()))}" if elsewhere else ""
        st.code(f"ampscope {first}{where}{rest}", language="bash", wrap_lines=True)


def _real_failure() -> None:
    st.markdown("Or see it at work on the decoder of an image model, which fails in fp16.")
    busy = diagnoses.busy_with()
    if st.button("Diagnose a real failure", type="primary", key="run-case", disabled=bool(busy)):
        zoo.start(SHOWN_CASE)
        st.rerun()
    links.link(links.ZOO, "More real failures")


def _demo() -> None:
    st.markdown(
        "The demo trains a small GPT in fp16 without a loss scaler, in fp16 with one, and in fp32, "
        "and opens the gradients that fp16 lost. It takes about 20 seconds."
    )
    if st.button("Run the demo", type="primary", key="run-demo"):
        links.keep(GROUP, live.start(invited_specs()))
        st.session_state[_OPENS] = True
        st.rerun()


SHOWN_LESSON = 3  # underflow: the measurement that explains loss scaling takes 4 s


def _lesson(ask: Callable[[int], None]) -> None:
    st.markdown(
        "Or see one at work: a small GPT's gradients in fp16, and how a loss scale saves them. It "
        "takes a few seconds."
    )
    if st.button("Run a lesson", type="primary", key="run-lesson"):
        ask(SHOWN_LESSON)
        query = {f"guess{SHOWN_LESSON}": "show"}
        st.switch_page(links.LESSON_ENTRIES[SHOWN_LESSON].file, query_params=query)


# The newest verdicts, one card each: the answer, where, and whether a fix was seen to work.


CARDS = 4
NEWEST = 5  # other runs, in short
ANSWER_LENGTH = 300


def show_newest(runs: list[RunInfo]) -> None:
    """The cards, then the newest of the other runs; follows what is under way."""
    is_moving = any(run.state.is_active for run in runs) or bool(diagnoses.busy_with())
    every = run_page.FOLLOW_EVERY_S if is_moving else None
    st.fragment(_newest, run_every=every)()


def _newest() -> None:
    all_entries = entries(listed_runs())
    judged = [e for e in all_entries if e[0].spec.kind in ("script", "watch")]
    others = [e for e in all_entries if e[0].spec.kind not in ("script", "watch")]
    if not all_entries:
        st.info("**The script is being started.** Its verdict will stand here.")
        return
    if judged:
        st.subheader("Newest verdicts", anchor=False)
        scripts = diagnoses.recorded_runs()
        for entry in judged[:CARDS]:
            with states.part():  # one run never hides the others
                _watched_card(entry) if entry[0].spec.kind == "watch" else _card(entry[0], scripts)
    if others:
        st.subheader("Probes and measurements", anchor=False)
        rows(others[:NEWEST])
    more = max(len(judged) - CARDS, 0) + max(len(others) - NEWEST, 0)
    links.link(links.RUNS, f"All runs ({more:,} older)" if more else "All runs")


def _card(head: RunInfo, scripts: Sequence[RunInfo]) -> None:
    """One diagnosed script."""
    case = diagnoses.read_case(head, scripts)
    word, color = case.verdict
    with st.container(border=True, gap="xxsmall"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.badge(word, color=color)
            st.markdown(f"**{escape(cut(run_page.name_of(head), 60))}**", width="content")
            st.caption(escape(f"{rules(head)}, {ago(head.created)}"))
        report = case.report
        if report is None:
            st.markdown(escape(_under_way(case)))
            going_on(head)
        else:
            nothing_read = diagnoses.bare(head)
            st.markdown(escape(cut(words.verdict(report, nothing_read), ANSWER_LENGTH)))
            if report.diagnosis.findings:
                fix = fix_words.sentence(report.diagnosis.findings[0], fix_words.chosen(report))
                said = escape(cut(fix, ANSWER_LENGTH))
                st.markdown(f"**Fix ({escape(fix_words.state(report))}).** {said}")
            elif report.undecided and not report.could_not_run:
                st.markdown(escape(cut(words.paragraph(report, nothing_read), ANSWER_LENGTH)))
            if case.is_moving:
                st.caption(escape(_under_way(case)))
        links.link(links.DIAGNOSIS, "Open the diagnosis", run=head.id)


def _under_way(case: diagnoses.Case) -> str:
    active = [run for run in case.runs if run.state.is_active]
    if not active:
        return "Under way: the next run is about to start."
    names = " and ".join(Control(run.spec.control).words for run in active)
    return f"Under way: the script runs {names}; started {ago(active[0].created)}."


@store.of_run
def _alarms(reader: Reader, run_id: str) -> list[Event]:
    """Of a watched training, in order."""
    return [event for event in reader.events(run_id) if event.kind == "alarm"]


@dataclass(frozen=True, slots=True)
class Watched:
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


def _watched(entry: Entry) -> Watched:
    alarms = [(event, rank) for rank in entry for event in _alarms(rank)]
    return Watched(
        tuple(sorted(alarms, key=lambda pair: pair[0].step)),
        tuple(store.totals(rank) for rank in entry),
        next((r.state for r in entry if r.state in (State.FAILED, State.LOST)), None),
    )


def _watched_card(entry: Entry) -> None:
    """One watched training, all ranks together."""
    run, found = entry[0], _watched(entry)
    word, color = found.verdict
    with st.container(border=True, gap="xxsmall"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.badge(word, color=color)
            st.markdown(f"**{escape(cut(run_page.name_of(run), 60))}**", width="content")
            world = [run_page.world_words(entry)] if is_rank(run) else []
            steps = _steps_and_skips(found.totals)
            facts = ["watched", *world, str(run.state), steps, ago(run.created)]
            st.caption(escape(", ".join(facts)))
        if found.alarms:
            event, rank = found.alarms[0]
            where = f", rank {rank.spec.rank}" if is_rank(rank) else ""
            name = ALARM_NAMES.get(event.name, event.name)
            several = len(found.alarms) > 1
            all_of_them = f"First of {len(found.alarms):,} alarms" if several else "Alarm"
            st.markdown(
                f"**{all_of_them}, at step {event.step:,}{where}: {escape(name)}.** "
                f"{escape(cut(alarm_text(event), ANSWER_LENGTH))}"
            )
        elif found.ended is None and any(r.steps_done for r in entry):
            so_far = " so far" if any(r.state.is_active for r in entry) else ""
            st.markdown(
                f"No alarm{so_far}, but the newest step's loss or gradient is not finite."
                if found.is_bad
                else f"Healthy{so_far}: no alarm."
            )
        _ended(entry)
        links.link(links.TRAINING, "Open the training", run=run.id)


def _steps_and_skips(ranks: Sequence[StepTotals]) -> str:
    """``3 of 1,200 steps skipped``, of the rank that has skipped most."""
    totals = max(ranks, key=lambda t: (t.skipped, t.steps))
    steps = plural(totals.steps, "step")
    if totals.last_scale is None and not totals.skipped:  # nothing that could skip
        return steps
    return f"{totals.skipped or 'none'} of {steps} skipped"


def show_keys() -> None:
    """The keys of every page."""
    st.caption("Keys: `/` finds a run, `g` `h` opens Home, `←` `→` move through steps.")


# The list of runs: state, name, what it was, links to its pages; found by words, and by what they
# are.


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
Entry = tuple[RunInfo, ...]  # runs that are shown as one; the first stands for all
_SHOWN = "recent-shown"
_FILTER_PX = 168  # two beside each other on a phone


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
class Listed:
    """An entry with what it can be found by, without reading what its runs recorded."""

    entry: Entry
    script: str  # file name of the script, or the built-in model
    verdicts: frozenset[str]  # of :data:`VERDICTS`
    cause: str  # code and title of the root cause; "" where none is known

    @property
    def text(self) -> str:
        """What words are looked for in."""
        run = self.entry[0]
        told = (run_page.name_of(run), run_page.described(run), run.spec.kind, run.id, self.cause)
        modes = (f"{r.state} {r.spec.mode}" for r in self.entry)
        return " ".join([*told, self.script, *sorted(self.verdicts), *modes]).lower()


def listed() -> list[Listed]:
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
        found.append(Listed(entry, name, frozenset(words), titled))
    return found


def _verdict_word(concluded: StoredVerdict | None) -> str:
    """As the badge of a diagnosis says it (:attr:`app.runs.diagnoses.Case.verdict`)."""
    if concluded is None:
        return UNSTORED
    if concluded.could_not_run:
        return "could not run"
    if concluded.latent and concluded.word == "no_fault":
        return "latent"
    return WORDS.get(concluded.word, concluded.word)


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
        asked = Asked(
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


@dataclass(frozen=True, slots=True)
class Asked:
    """What the page Runs is asked for."""

    words: tuple[str, ...]
    kind: str = ANY
    verdict: str = ANY
    script: str = ANY
    age: str = ANY

    def fits(self, one: Listed, now: float) -> bool:
        """Whether an entry is to be shown."""
        run, kinds = one.entry[0], KINDS[self.kind]
        return (
            now - run.created <= AGES[self.age]
            and (not kinds or run.spec.kind in kinds)
            and self.verdict in (ANY, *one.verdicts)
            and self.script in (ANY, one.script)
            and (not self.words or all(word in one.text for word in self.words))
        )


def _found_rows(asked: Asked) -> None:
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
            verdict = _watched(entry).verdict if run.spec.kind == "watch" else None
            case = diagnoses.read_case(run, scripts) if is_script(run) else None
            verdict = verdict if case is None else case.verdict
            run_page.title_line(run, () if is_rank(run) else entry[1:], verdict)
            if case is not None and case.report is not None and case.report.diagnosis.findings:
                root = CAUSES[case.report.diagnosis.findings[0].cause]
                st.markdown(escape(f"{root.title} ({root.code})"))
            st.caption(escape(" · ".join(_facts(entry))))
            _ended(entry)
            for one in entry:
                going_on(one)
        with pages.container(horizontal=True, horizontal_alignment="right"):
            name = "run" if run.spec.is_training else run.spec.kind
            if (page := _page(run)) is not None:
                links.link(page, f"Open {page.title}", **{name: run.id})


def _page(run: RunInfo) -> links.Entry | None:
    """The page that answers first; the others of a run are its tabs."""
    if not run.spec.is_training:
        return links.MEASUREMENT_PAGES[run.spec.kind]
    return next(iter(run_page.pages_of(run)), None)


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
        live.delete(chosen)
        st.rerun()
