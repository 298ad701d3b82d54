"""The order of every page: a sentence, at most four key figures, the chart, the details folded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.text import escape

MAX_KEY_FIGURES = 4
# Numbers and words that Markdown leaves as they are; a name from a run is escaped.
_FIGURE = re.compile(r"(?!www\.|\d+[.)] )[A-Za-z0-9−≥≤∞](?:[A-Za-z0-9 ,.%×^/()+−∞µ·–]|-(?!-))*")


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A label of two or three words, a value, and on hover what it means."""

    label: str
    value: str
    help: str = ""


def sentence(text: str) -> None:
    """The page's answer for this run, in plain words. Names in it are shown as text."""
    st.subheader(escape(text), anchor=False)


def see(text: str) -> None:
    """What to see in the chart below."""
    st.markdown(escape(text))


def key_figures(figures: Sequence[KeyFigure]) -> None:
    """At most four, side by side."""
    if len(figures) > MAX_KEY_FIGURES:
        raise ValueError(f"{len(figures)} key figures; a page has at most {MAX_KEY_FIGURES}")
    with st.container(horizontal=True):  # wraps where four do not fit beside each other
        for figure in figures:
            st.metric(
                escape(figure.label),
                figure.value if _FIGURE.fullmatch(figure.value) else escape(figure.value),
                help=escape(figure.help) or None,
                border=True,
            )


def details(title: str) -> DeltaGenerator:
    """A folded section: ``with layout.details("All modules"): …``"""
    return st.expander(title)
