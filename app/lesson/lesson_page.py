"""The one shape of a lesson's page.

    what will be seen -> predict -> controls -> measurement, chart, what it shows -> your own code
    -> where to read on -> the next lesson

Nothing is measured or shown before the reader has predicted or asked to be shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import streamlit as st

from ampscope.lessons.catalog import LESSONS, LessonInfo, every_spec, lesson_spec
from ampscope.records import Result
from app import layout, links, sitemap
from app.lesson import large_type, lesson_question, lesson_runs
from app.lesson.lesson_question import Answer
from app.lesson.sources import Source
from app.lesson.terms import TERMS
from app.text import escape

FRAMEWORKS = ("PyTorch", "Paddle", "Keras")


@dataclass(frozen=True, slots=True)
class Setting:
    """A choice that needs a measurement of its own: its label, and words for its values, short
    enough to stand side by side on a phone. ``help`` says what they leave out."""

    label: str
    values: Mapping[str, str]
    help: str | None = None


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a lesson brings; ``app/learn/`` has one a file.

    ``answer`` judges the prediction by the measured results, ``draw`` shows them: chart, controls
    that need no new measurement, and sentences computed from the numbers.
    """

    id: str
    question: str
    choices: tuple[str, ...]
    answer: Callable[[Sequence[Result]], Answer]
    draw: Callable[[Sequence[Result]], None]
    code: Mapping[str, str]  # by framework
    sources: tuple[Source, ...]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    terms: tuple[str, ...] = ()
    code_note: str = ""
    after: Callable[[], None] = lambda: None  # what follows the chart

    @property
    def info(self) -> LessonInfo:
        """Number, title, sentence."""
        return LESSONS[self.id]


def show(lesson: Lesson) -> None:
    """Draw the whole page."""
    begin(lesson)
    guess = lesson_question.ask(lesson.info.number, lesson.question, lesson.choices)
    results = None
    if guess is not None:
        verdict = st.container()  # right below the prediction: on a small screen it would be missed
        asked = _settings(lesson)
        number = lesson.info.number
        results = lesson_runs.results(
            lesson_spec(lesson.id, **asked),
            is_asked=lesson_question.is_clicked(number),
            ask=partial(lesson_question.click, number),
        )
        if results is not None:
            with verdict:
                lesson_question.judge(guess, lesson.choices, lesson.answer(results))
            st.fragment(lesson.draw)(results)  # what it draws, its controls change alone
    if guess is None or results is not None:
        lesson_runs.expect(every_spec(lesson.id))
    if results is not None:
        lesson.after()
    end(lesson)


def begin(lesson: Lesson) -> None:
    """Title, what will be seen, words."""
    large_type.offer()
    info = lesson.info
    st.title(f"{info.number} {info.title}", anchor=False)
    layout.sentence(info.sentence)
    if lesson.terms:
        with st.container(horizontal=True, gap="small"):
            st.caption("Words:", width="content")
            for term in lesson.terms:
                st.caption(escape(term), width="content", help=TERMS[term])


def end(lesson: Lesson, code: Mapping[str, str] | None = None) -> None:
    """Your own code (or ``code``), where to read on, the next lesson."""
    st.subheader("In your own code", anchor=False)
    for tab, name in zip(st.tabs(list(FRAMEWORKS)), FRAMEWORKS, strict=True):
        with tab:
            st.code((code or lesson.code)[name].strip("\n"), language="python", wrap_lines=True)
    if lesson.code_note:
        st.caption(escape(lesson.code_note))
    st.subheader("Where to read on", anchor=False)
    st.markdown("\n".join(f"- [{escape(one.title)}]({one.url})" for one in lesson.sources))
    _neighbours(lesson.info.number)


def _settings(lesson: Lesson) -> dict[str, str]:
    asked: dict[str, str] = {}
    if not lesson.settings:
        return asked
    with st.container(horizontal=True, gap="large"):
        for name, setting in lesson.settings.items():
            asked[name] = links.pick(
                setting.label,
                f"{name}{lesson.info.number}",
                lesson.info.settings[name],
                format_func=lambda value, words=setting.values: words[value],  # type: ignore[misc]
                help=setting.help,
            )
    return asked


def _neighbours(number: int) -> None:
    st.divider()
    with st.container(horizontal=True, horizontal_alignment="distribute"):
        for other, arrow in ((number - 1, "arrow_back"), (number + 1, "arrow_forward")):
            entry = sitemap.LESSON_ENTRIES.get(other, sitemap.LEARN)
            st.page_link(
                entry.file,
                label=entry.title if other in sitemap.LESSON_ENTRIES else "All lessons",
                icon=f":material/{arrow}:",
                query_params=large_type.kept(),
            )
