"""The one shape of a lesson's page, and the overview of all lessons.

    what will be seen -> predict -> controls -> measurement, chart, what it shows -> your own code
    -> where to read on -> the next lesson

Nothing is measured or shown before the reader has predicted or asked to be shown. What each lesson
teaches lies in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from ampscope.ext.lessons.catalog import LESSONS, LessonInfo, every_spec, lesson_spec, page_name
from ampscope.records import Result
from app import chart, links, permissions
from app.ext.lessons import large_type, lesson_runs, prediction
from app.ext.lessons.references import TERMS, Source
from app.text import escape

# Lessons by number: numbers, what they do to gradients, what happens without care, its diagnosis.
PATH = (1, 3, 6)
SHOWN = 3  # on Home: underflow, the measurement that explains loss scaling, takes 4 s
LEARN = links.EXTENSION_ENTRIES["learn"]
LESSON_ENTRIES = {one.number: links.EXTENSION_ENTRIES[page_name(one)] for one in LESSONS.values()}


@dataclass(frozen=True, slots=True)
class Setting:
    """A choice that needs a measurement of its own: its label, and words for its values, short
    enough to stand side by side on a phone. ``help`` says what they leave out."""

    label: str
    values: Mapping[str, str]
    help: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What a lesson brings to its page: the constant ``LESSON`` of its file in
    ``app/ext/lessons/``."""

    id: str
    question: str
    choices: tuple[str, ...]
    sources: tuple[Source, ...]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    terms: tuple[str, ...] = ()

    @property
    def info(self) -> LessonInfo:
        """Number, title, sentence."""
        return LESSONS[self.id]

    def show(self) -> None:
        """Draw the whole page."""
        raise NotImplementedError

    def begin(self) -> None:
        """Title, what will be seen, words."""
        large_type.offer()
        st.title(f"{self.info.number} {self.info.title}", anchor=False)
        chart.sentence(self.info.sentence)
        if self.terms:
            with st.container(horizontal=True, gap="small"):
                st.caption("Words:", width="content")
                for term in self.terms:
                    st.caption(escape(term), width="content", help=TERMS[term])

    def end(self, code: Mapping[str, str], note: str = "") -> None:
        """Lines for the reader's own training by framework, where to read on, the next lesson."""
        st.subheader("In your own code", anchor=False)
        for tab, text in zip(st.tabs(list(code)), code.values(), strict=True):
            with tab:
                st.code(text.strip("\n"), language="python", wrap_lines=True)
        if note:
            st.caption(escape(note))
        st.subheader("Where to read on", anchor=False)
        st.markdown("\n".join(f"- [{escape(one.title)}]({one.url})" for one in self.sources))
        st.divider()
        with st.container(horizontal=True, horizontal_alignment="distribute"):
            for step, arrow in ((-1, "arrow_back"), (1, "arrow_forward")):
                entry = LESSON_ENTRIES.get(self.info.number + step, LEARN)
                label = "All lessons" if entry is LEARN else entry.title
                _link(entry, label=label, icon=f":material/{arrow}:")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLesson(Lesson):
    """A lesson with a measurement of its own.

    ``answer`` judges the prediction by the measured results, ``draw`` shows them: chart, controls
    that need no new measurement, and sentences computed from the numbers.
    """

    answer: Callable[[Sequence[Result]], prediction.Answer]
    draw: Callable[[Sequence[Result]], None]
    code: Mapping[str, str]  # lines for the reader's own training, by framework
    code_note: str = ""
    after: Callable[[], None] | None = None  # what follows the chart

    def show(self) -> None:
        """Draw the whole page."""
        self.begin()
        number = self.info.number
        guess = prediction.ask(number, self.question, self.choices)
        results = None
        if guess is not None:
            verdict = st.container()  # below the prediction: on a small screen it would be missed
            results = lesson_runs.results(
                lesson_spec(self.id, **self._asked()),
                is_asked=prediction.is_clicked(number),
                ask=partial(prediction.click, number),
            )
            if results is not None:
                with verdict:
                    prediction.judge(guess, self.choices, self.answer(results))
                st.fragment(self.draw)(results)  # what it draws, its controls change alone
        if guess is None or results is not None:
            lesson_runs.expect(every_spec(self.id))
        if results is not None and self.after is not None:
            self.after()
        self.end(self.code, self.code_note)

    def _asked(self) -> dict[str, str]:
        """The chosen settings of the measurement."""
        if not self.settings:
            return {}
        with st.container(horizontal=True, gap="large"):
            return {
                name: links.pick(
                    setting.label,
                    f"{name}{self.info.number}",
                    self.info.settings[name],
                    format_func=lambda value, words=setting.values: words[value],  # type: ignore[misc]
                    help=setting.help,
                )
                for name, setting in self.settings.items()
            }


def show_chart(figure: go.Figure, name: str, table: pd.DataFrame, text: str, alt: str = "") -> None:
    """A lesson's chart: large where asked for, with words and numbers for those who cannot see it.

    ``text`` stands above the chart and describes it to them, unless ``alt`` does; ``table`` holds
    every number of the figure.
    """
    chart.see(text)
    alt = alt or text
    if large_type.is_on():
        figure = go.Figure(figure)  # cached ones are shown to every user
        large_type.enlarge(figure)
    chart.show(figure, name, lambda: table, key=name, alt=alt)
    with chart.details("This chart in words and numbers"):
        st.text(alt)
        st.dataframe(table, hide_index=True, key=f"{name}-table")


def show_overview() -> None:
    """The page Learn: a newcomer's path, and every lesson in one line."""
    large_type.offer()
    st.title("Learn", anchor=False)
    chart.sentence("Predict, then measure: every number in a lesson was measured on this machine.")
    chart.see("A lesson takes about five minutes, and its measurement a few seconds.")
    st.subheader("New here?", anchor=False)
    with st.container(horizontal=True, gap="medium"):
        for number in PATH:
            _link(LESSON_ENTRIES[number])
    st.caption("The third ends with the diagnosis of its own failure.")
    links.link(links.ZOO, "More failures to diagnose: the Zoo")
    st.subheader("All lessons", anchor=False)
    for info in LESSONS.values():
        with st.container(border=True, gap="xxsmall"):
            _link(LESSON_ENTRIES[info.number])
            st.markdown(escape(info.sentence))


def show_door(*, is_empty: bool) -> None:
    """The way in on Home."""
    st.markdown("**Learn mixed precision**")
    st.markdown(
        "Lessons that measure on this machine: predict, run, and compare; for yourself, or as "
        "the teacher of a class."
    )
    if permissions.is_trusted():
        st.code("ampscope dashboard --classroom", language="bash", wrap_lines=True)
    if is_empty:
        st.markdown(
            "Or see one at work: a small GPT's gradients in fp16, and how a loss scale saves them. "
            "It takes a few seconds."
        )
        if st.button("Run a lesson", type="primary", key="run-lesson"):
            prediction.click(SHOWN)
            st.switch_page(LESSON_ENTRIES[SHOWN].page(), query_params={f"guess{SHOWN}": "show"})
    else:
        links.link(LESSON_ENTRIES[1], f"Lesson {LESSON_ENTRIES[1].title}")
    links.link(LEARN, "All lessons")


def _link(entry: links.Entry, label: str = "", icon: str = "") -> None:
    """A link to another lesson, which keeps the large type."""
    links.link(entry, label, icon, **large_type.query())
