"""The page Home: the ways in, the demo, and the newest verdicts with what to do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import streamlit as st

from ampscope import extensions
from ampscope.analysis.ranks import is_rank
from ampscope.control import Control
from ampscope.number_words import plural
from ampscope.records import Cadence, RunInfo, RunSpec, State, StepTotals
from ampscope.store.db import default_path
from ampscope.story import fix_words
from ampscope.story import verdict_words as words
from ampscope.story.run_words import rules
from ampscope.story.training_words import ALARM_NAMES
from app import links, options, permissions, states, store, zoo
from app.run_list import Entry, entries, going_on, listed_runs, rows, watched, why_ended
from app.runs import actions, diagnoses, run_page
from app.text import ago, cut, escape
from app.training import alarm_text

STEPS = 20
LAST_SHADOW = (STEPS - 1) // Cadence().shadow * Cadence().shadow  # where lost values are known
# Measured on GPT tiny: at step 10 fp16 then loses 89 % of the output gradients without a scaler and
# 5 % with one, and at step 15 the loss (over the factor) is 3.59 without, 3.03 with, 3.04 in fp32.
# At 2^-8 as many gradients go, but Adam makes up for it and the loss curves look alike.
LOSS_FACTOR = 2.0**-11
PRECISIONS = ("fp16-noscaler", "fp16", "fp32")
GROUP = "demo"  # the URL's name for the demo's group
_OPENS = "demo-opens"  # session key: this session started the demo and waits for its result
SHOWN_CASE = "c04_vae_decoder.py"  # diagnosed and cured in 9 s, of the zoo's quickest
CARDS = 4
NEWEST = 5  # other runs, in short
ANSWER_LENGTH = 300


def show_doors(*, is_empty: bool) -> None:
    """The ways in, always: each names a question, and has a page, a command, or a button that
    shows it at work. ``is_empty``: nothing is recorded yet, and each door offers something to see.
    """
    may_start = is_empty and permissions.is_trusted()
    others = extensions.home_doors()
    diverged, half, *places = st.columns(2 + len(others), border=True)
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
    for place, door in zip(places, others, strict=True):
        with place:
            extensions.load(door)(is_empty=is_empty)


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
        links.keep(GROUP, actions.start(invited_specs()))
        st.session_state[_OPENS] = True
        st.rerun()


def invited_specs() -> list[RunSpec]:
    """One small GPT with a small loss, three times: fp16 without a scaler loses gradients, fp16
    with one does not, and fp32 shows what they should have been. The worst first: its result is
    what opens."""
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
    runs = actions.of_group(group) if group else []
    if not runs:
        return False
    st.subheader("Demo", anchor=False)
    actions.show_progress(group, key="demo")
    has_ended = all(run.state is State.FINISHED for run in runs)
    if has_ended and st.session_state.pop(_OPENS, False):
        links.keep(GROUP, None)
        result = {"run": runs[0].id, "role": "grad_output", "step": str(LAST_SHADOW)}
        st.switch_page(links.GRADIENTS.file, query_params=result)
    return any(run.state.is_active for run in runs)


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
            with states.contained():  # one run never hides the others
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


def _under_way(case: diagnoses.DiagnosisCase) -> str:
    active = [run for run in case.runs if run.state.is_active]
    if not active:
        return "Under way: the next run is about to start."
    names = " and ".join(Control(run.spec.control).words for run in active)
    return f"Under way: the script runs {names}; started {ago(active[0].created)}."


def _watched_card(entry: Entry) -> None:
    """One watched training, all ranks together."""
    run, found = entry[0], watched(entry)
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
        why_ended(entry)
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
