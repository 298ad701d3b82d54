"""The Learn page: a newcomer's path, and every lesson in one line."""

from __future__ import annotations

import streamlit as st

from ampscope.lessons.catalog import LESSONS, LessonInfo
from app import layout, sitemap
from app.lesson import large_type
from app.text import escape

# Numbers, what they do to gradients, what happens without care, and its diagnosis.
PATH = (1, 3, 6)


def show() -> None:
    """The whole page."""
    large_type.offer()
    st.title("Learn", anchor=False)
    layout.sentence("Predict, then measure: every number in a lesson was measured on this machine.")
    layout.see("A lesson takes about five minutes, and its measurement a few seconds.")
    st.subheader("New here?", anchor=False)
    with st.container(horizontal=True, gap="medium"):
        for number in PATH:
            _link(number)
    st.caption("The third ends with the diagnosis of its own failure.")
    st.page_link(
        sitemap.ZOO.file, label="More failures to diagnose: the Zoo", icon=sitemap.ZOO.icon,
    )  # fmt: skip
    st.subheader("All lessons", anchor=False)
    for number in sitemap.LESSON_ENTRIES:
        with st.container(border=True, gap="xxsmall"):
            _link(number)
            st.markdown(escape(_info(number).sentence))


def _link(number: int) -> None:
    entry = sitemap.LESSON_ENTRIES[number]
    st.page_link(
        entry.file, label=entry.title, icon=entry.icon, query_params=large_type.kept(),
        width="content",
    )  # fmt: skip


def _info(number: int) -> LessonInfo:
    return next(one for one in LESSONS.values() if one.number == number)
