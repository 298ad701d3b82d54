"""Lesson 13: eight common mistakes. Each a script, a prediction, and a real diagnosis of it."""

from __future__ import annotations

import difflib
import math

import pandas as pd
import streamlit as st

from ampscope.lessons.mistake_scripts import BY_ID, MISTAKES, STEPS, Mistake, script_path
from ampscope.records import StepRecord
from ampscope.report.words import verdict as diagnosis_words
from ampscope.report.words.controls import control
from app import (
    diagnosis_data,
    diagnosis_jobs,
    layout,
    lesson_chart,
    lesson_question,
    links,
    permissions,
    run_page,
    sitemap,
    store,
)
from app.diagnosis_data import Case
from app.figures.lesson_lines import Line, lines
from app.learn import mistakes_code
from app.learn.sources import KERAS, PADDLE, TORCH_AMP, TORCH_EXAMPLES
from app.lesson_page import Lesson, begin, end
from app.lesson_question import Answer
from app.palette import DTYPES
from app.text import duration, escape

CHOICES = (
    "It ends with an error",
    "It runs, and does something wrong",
    "Nothing: the mistake is harmless here",
)
LOOKS = {"as_is": (DTYPES["fp16"], "solid"), "fp32": (DTYPES["fp32"], "dash")}


def show() -> None:
    """The whole page."""
    ids = [m.id for m in MISTAKES]
    chosen = BY_ID[links.chosen("mistake13", ids, ids[0])]
    begin(LESSON)
    links.select("Mistake", "mistake13", ids, format_func=lambda i: BY_ID[i].title)
    layout.see(chosen.sentence)
    st.code(script_path(chosen.id).read_text(), language="python", wrap_lines=True)
    guess = lesson_question.ask(f"13{chosen.id}", LESSON.question, CHOICES)
    if guess is not None:
        case = newest(chosen)
        if _is_ready(chosen, case) and case is not None:
            lesson_question.judge(guess, CHOICES, judged(case))
            _found(case)
        with layout.details("The mended script: what changed, and what a diagnosis says of it"):
            st.code(changes(chosen), language="diff", wrap_lines=True)
            _mended(chosen)
    end(LESSON, mistakes_code.of(chosen.id))


def newest(mistake: Mistake, *, mended: bool = False) -> Case | None:
    """The newest diagnosis of its script in the store."""
    path = str(script_path(mistake.id, mended=mended))
    runs = diagnosis_data.runs()
    head = next((h for h in diagnosis_data.heads(runs) if h.spec.workload == path), None)
    return None if head is None else diagnosis_data.opened(head, runs)


def judged(case: Case) -> Answer:
    """What became of the script, as its runs recorded it."""
    assert case.report is not None
    as_is = diagnosis_data.view(case.run_of("as_is") or case.head)
    words = diagnosis_words.verdict(case.report, as_is)
    if as_is.outcome.ended == "exception":
        return Answer(0, f"It raised {as_is.outcome.error_type}. The diagnosis: {words}")
    return Answer(1 if case.report.diagnosis.findings else 2, f"The diagnosis: {words}")


def changes(mistake: Mistake) -> str:
    """The lines that differ, as a patch."""
    before, after = (
        script_path(mistake.id, mended=mended).read_text().splitlines() for mended in (False, True)
    )
    found = difflib.unified_diff(before, after, "with the mistake", "mended", n=1, lineterm="")
    return "\n".join(found)


def _is_ready(mistake: Mistake, case: Case | None, *, mended: bool = False) -> bool:
    """Offer the diagnosis, or follow it; True when there is one to show."""
    path = script_path(mistake.id, mended=mended)
    problem = diagnosis_jobs.problem(str(path))
    if problem:
        st.error(escape(problem))
    is_moving = diagnosis_jobs.is_running(str(path)) or (case is not None and case.is_moving)
    if is_moving:
        _following(str(path), "" if case is None else diagnosis_data.version(case))
        return False
    is_done = case is not None and case.report is not None
    if not permissions.is_trusted():
        if not is_done:
            permissions.offers("diagnosing this script, which takes half a minute")
        return is_done
    busy = diagnosis_jobs.busy_with()
    label = "Diagnose again" if is_done else "Diagnose it"
    clicked = st.button(
        label, key=f"dx13-{path.stem}", disabled=bool(busy),
        type="tertiary" if is_done else "primary",
        help="It runs the script several times, for about half a minute."
        + (" One diagnosis at a time." if busy else ""),
    )  # fmt: skip
    if clicked:
        diagnosis_jobs.start_diagnosis(path, mistake.policy, STEPS)
        st.rerun()
    return is_done


def _found(case: Case) -> None:
    assert case.report is not None
    as_is = diagnosis_data.view(case.run_of("as_is") or case.head)
    layout.see(diagnosis_words.paragraph(case.report, as_is))
    st.markdown(f"**What to do.** {escape(diagnosis_words.next_step(case.report, as_is))}")
    finding = next(iter(case.report.diagnosis.findings), None)
    if finding is not None and finding.verdict.fix.patch:
        st.code(finding.verdict.fix.patch, language="python", wrap_lines=True)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.page_link(
            sitemap.DIAGNOSIS.file, label="Open the diagnosis", icon=sitemap.DIAGNOSIS.icon,
            query_params={"run": case.head.id},
        )  # fmt: skip
        took = duration(case.report.elapsed_s)
        st.caption(f"{run_page.policy_of(case.head.machine)} · it took {took}", width="content")
    _losses(case)


def _losses(case: Case) -> None:
    found = {c: run for c in LOOKS if (run := case.run_of(c)) is not None}
    steps = {c: [s for s in store.steps(run) if s.loss is not None] for c, run in found.items()}
    curves = [
        Line(f"the script {control(c)}", [s.step for s in seen], [_drawn(s) for s in seen],
             LOOKS[c][0], dash=LOOKS[c][1], has_markers=len(seen) < 3)
        for c, seen in steps.items() if seen
    ]  # fmt: skip
    if not curves:
        st.caption("No loss was recorded of its runs.")
        return
    text = "; ".join(f"{c.name}: last loss {c.y[-1]:.4g}" for c in curves) + "."
    layout.see(text)
    figure = lines(curves, x_title="optimizer step", y_title="loss")
    table = pd.DataFrame(
        [(c, s.step, s.loss, s.skipped) for c, seen in steps.items() for s in seen],
        columns=["run", "step", "loss", "skipped"],
    )
    lesson_chart.show(figure, "lesson-mistakes", table, text)


def _mended(mistake: Mistake) -> None:
    case = newest(mistake, mended=True)
    if _is_ready(mistake, case, mended=True) and case is not None and case.report is not None:
        as_is = diagnosis_data.view(case.run_of("as_is") or case.head)
        layout.see(diagnosis_words.verdict(case.report, as_is))


def _drawn(step: StepRecord) -> float:
    return step.loss if step.loss is not None and math.isfinite(step.loss) else math.nan


@st.fragment(run_every=run_page.FOLLOW_EVERY_S)
def _following(path: str, version: str) -> None:
    runs = diagnosis_data.runs()
    head = next((h for h in diagnosis_data.heads(runs) if h.spec.workload == path), None)
    case = None if head is None else diagnosis_data.opened(head, runs)
    is_moving = diagnosis_jobs.is_running(path) or (case is not None and case.is_moving)
    if not is_moving or (case is not None and diagnosis_data.version(case) != version):
        st.rerun(scope="app")
    ended = 0 if case is None else sum(not run.state.is_active for run in case.runs)
    st.info(f"**Diagnosing on this machine.** {ended} of its runs have ended so far.",
            icon=":material/hourglass_top:")  # fmt: skip


LESSON = Lesson(
    id="mistakes",
    question="What happens when this script runs?",
    choices=CHOICES,
    answer=lambda results: Answer(0, ""),
    draw=lambda results: None,
    terms=("autocast", "scaler", "loss scale", "half precision"),
    code=mistakes_code.of("no_scaler"),
    sources=(TORCH_EXAMPLES, TORCH_AMP, PADDLE, KERAS),
)
