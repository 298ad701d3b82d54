"""Lesson 13: eight common mistakes. Each a script, a prediction, and a real diagnosis of it."""

from __future__ import annotations

import difflib

import streamlit as st

from ampscope.analysis.run_view import RunView
from ampscope.lessons.catalog import BY_ID, MISTAKES, Mistake, script_path
from ampscope.story import verdict_words as diagnosis_words
from app import chart, links
from app.learn import lesson_diagnosis, lesson_runs
from app.learn.lesson_page import Lesson, Source, begin, end
from app.learn.lesson_runs import Answer
from app.runs import diagnoses
from app.runs.diagnoses import Case

CHOICES = (
    "It ends with an error",
    "It runs, and does something wrong",
    "Nothing: the mistake is harmless here",
)


def show() -> None:
    """The whole page."""
    ids = [m.id for m in MISTAKES]
    chosen = BY_ID[links.chosen("mistake13", ids, ids[0])]
    begin(LESSON)
    links.select("Mistake", "mistake13", ids, format_func=lambda i: BY_ID[i].title)
    chart.see(chosen.sentence)
    st.code(script_path(chosen.id).read_text(), language="python", wrap_lines=True)
    guess = lesson_runs.ask(f"13{chosen.id}", LESSON.question, CHOICES)
    if guess is not None:
        if case := lesson_diagnosis.diagnosed(chosen):
            lesson_runs.judge(guess, CHOICES, judged(case))
            lesson_diagnosis.found(case)
        with chart.details("The fixed script: what changed, and what a diagnosis says of it"):
            st.code(changes(chosen), language="diff", wrap_lines=True)
            if fixed := lesson_diagnosis.diagnosed(chosen, is_fixed=True):
                chart.see(_verdict(fixed))
    end(LESSON, chosen.id)


def judged(case: Case) -> Answer:
    """What became of the script, as its runs recorded it."""
    assert case.report is not None
    baseline, words = _baseline(case), _verdict(case)
    if baseline.outcome.ended == "exception":
        return Answer(0, f"It raised {baseline.outcome.error_type}. The diagnosis: {words}")
    return Answer(1 if case.report.diagnosis.findings else 2, f"The diagnosis: {words}")


def changes(mistake: Mistake) -> str:
    """The lines that differ, as a patch."""
    before, after = (
        script_path(mistake.id, is_fixed=is_fixed).read_text().splitlines()
        for is_fixed in (False, True)
    )
    found = difflib.unified_diff(before, after, "with the mistake", "fixed", n=1, lineterm="")
    return "\n".join(found)


def _verdict(case: Case) -> str:
    assert case.report is not None
    return diagnosis_words.verdict(case.report, _baseline(case))


def _baseline(case: Case) -> RunView:
    return diagnoses.observed(case.run_of("as_is") or case.head)


LESSON = Lesson(
    id="mistakes",
    question="What happens when this script runs?",
    choices=CHOICES,
    answer=lambda results: Answer(0, ""),
    draw=lambda results: None,
    terms=("autocast", "scaler", "loss scale", "half precision"),
    sources=(Source.TORCH_EXAMPLES, Source.TORCH_AMP, Source.PADDLE, Source.KERAS),
)
