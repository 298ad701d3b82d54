"""Predict first: a question with choices, and what the measurement says of the prediction.

The choice lives in the URL (``?guess3=b``); ``?guess3=show`` shows the answer without one. An
address shows what is there; it is a click that starts a measurement (:func:`is_clicked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import streamlit as st

from app import links
from app.text import escape

LETTERS = "abcdef"
SHOW = "show"  # the answer without a prediction
_CLICKED = "lesson-clicked:"  # session key


@dataclass(frozen=True, slots=True)
class Answer:
    """Which choice the measured numbers support, and a sentence computed from them."""

    choice: int
    text: str


def ask(number: int | str, question: str, choices: Sequence[str]) -> str | None:
    """The letter that was chosen, :data:`SHOW`, or None as long as nothing was."""
    name = f"guess{number}"
    letters = list(LETTERS[: len(choices)])
    known = links.wanted(name)
    guess = known if known in (*letters, SHOW) else None
    shown = guess if guess in letters else None
    key = links.widget_key(name, shown)
    st.radio(
        f"**Predict first.** {escape(question)}",
        letters,
        index=None if shown is None else letters.index(shown),
        key=key,
        format_func=lambda letter: escape(choices[letters.index(letter)]),
        on_change=_remember,
        args=(number, key),
    )
    if guess is None:
        st.button("Show without a prediction", key=f"show{number}", on_click=_show,
                  args=(number,))  # fmt: skip
    else:
        st.button("Hide the answer", key=f"hide{number}", type="tertiary", on_click=links.keep,
                  args=(name, None))  # fmt: skip
    return guess


def _remember(number: int | str, key: str) -> None:
    if st.session_state[key] in tuple(LETTERS):
        click(number)
        links.keep(f"guess{number}", st.session_state[key])


def _show(number: int | str) -> None:
    click(number)
    links.keep(f"guess{number}", SHOW)


def click(number: int | str) -> None:
    """The reader asks for this lesson's measurement."""
    st.session_state[_CLICKED + str(number)] = True


def is_clicked(number: int | str) -> bool:
    """Whether this reader predicted, or asked, with a click. An address can be another's: a link
    on a foreign page must start nothing."""
    return bool(st.session_state.get(_CLICKED + str(number)))


def judge(guess: str, choices: Sequence[str], answer: Answer) -> None:
    """Show the prediction and the measurement; in words, not by colour alone."""
    right = LETTERS[answer.choice]
    measured = f"**Measured.** {escape(answer.text)}"
    if guess == SHOW:
        st.info(measured, icon=":material/straighten:")
    elif guess == right:
        st.success(f"**As you predicted.**  \n{measured}", icon=":material/check:")
    else:
        said = escape(choices[LETTERS.index(guess)])
        st.warning(f"**You predicted:** {said}.  \n{measured}", icon=":material/straighten:")
