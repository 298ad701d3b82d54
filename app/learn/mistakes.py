"""Lesson 13: eight common mistakes. Each a script, a prediction, and a real diagnosis of it."""

from __future__ import annotations

import difflib

import streamlit as st

from ampscope.lessons.mistake_scripts import BY_ID, MISTAKES, Mistake, script_path
from ampscope.report.words import verdict as diagnosis_words
from app import layout, links
from app.diagnosis import diagnosis_data
from app.diagnosis.diagnosis_data import Case
from app.learn import mistakes_code
from app.lesson import lesson_diagnosis, lesson_question
from app.lesson.lesson_page import Lesson, begin, end
from app.lesson.lesson_question import Answer
from app.lesson.sources import KERAS, PADDLE, TORCH_AMP, TORCH_EXAMPLES

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
    layout.see(chosen.sentence)
    st.code(script_path(chosen.id).read_text(), language="python", wrap_lines=True)
    guess = lesson_question.ask(f"13{chosen.id}", LESSON.question, CHOICES)
    if guess is not None:
        case = lesson_diagnosis.newest(chosen)
        if lesson_diagnosis.is_ready(chosen, case) and case is not None:
            lesson_question.judge(guess, CHOICES, judged(case))
            lesson_diagnosis.found(case)
        with layout.details("The mended script: what changed, and what a diagnosis says of it"):
            st.code(changes(chosen), language="diff", wrap_lines=True)
            _mended(chosen)
    end(LESSON, mistakes_code.of(chosen.id))


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


def _mended(mistake: Mistake) -> None:
    case = lesson_diagnosis.newest(mistake, mended=True)
    is_ready = lesson_diagnosis.is_ready(mistake, case, mended=True)
    if is_ready and case is not None and case.report is not None:
        as_is = diagnosis_data.view(case.run_of("as_is") or case.head)
        layout.see(diagnosis_words.verdict(case.report, as_is))


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
