"""Every view has an address: a page's choices live in the URL (`?run=…&step=…&module=…&role=…`).

A widget made here starts from the URL and writes back to it. Streamlit drops the URL's parameters
when a person walks to another page, so the session remembers the last choice of each name, and the
same run, step and module are still chosen there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlencode

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

T = TypeVar("T")
_MEMORY = "link:"  # session keys of remembered choices
_WIDGET = "widget:"


def wanted(name: str) -> str:
    """What the URL asks for, else the session's last choice, else an empty text."""
    if name in st.query_params:
        return str(st.query_params[name])
    return str(st.session_state.get(_MEMORY + name, ""))


def keep(name: str, value: object) -> None:
    """Put a choice into the URL and remember it; None takes it out of both."""
    if value is None:
        st.query_params.pop(name, None)
        st.session_state.pop(_MEMORY + name, None)
        return
    text = str(value)
    st.session_state[_MEMORY + name] = text
    if st.query_params.get(name) != text:
        st.query_params[name] = text


def chosen(name: str, options: Sequence[T], default: T) -> T:
    """The option whose text the URL (or the session) names, else ``default``."""
    text = wanted(name)
    return next((option for option in options if str(option) == text), default)


def select(
    label: str,
    name: str,
    options: Sequence[T],
    *,
    default: T | None = None,
    format_func: Callable[[T], str] = str,
    help: str | None = None,
    place: DeltaGenerator | None = None,
) -> T:
    """A select box (with search) bound to the URL's ``name``. ``options`` must not be empty."""
    first = options[0] if default is None else default
    _follow_url(name, options, first)
    value = (place or st).selectbox(
        label,
        options,
        key=_WIDGET + name,
        format_func=format_func,
        help=help,
    )
    keep(name, value)
    return value


def pick(
    label: str,
    name: str,
    options: Sequence[T],
    *,
    default: T | None = None,
    format_func: Callable[[T], str] = str,
    help: str | None = None,
    place: DeltaGenerator | None = None,
) -> T:
    """One of a few, side by side, bound to the URL's ``name``."""
    first = options[0] if default is None else default
    _follow_url(name, options, first)
    value = (place or st).segmented_control(
        label, options, key=_WIDGET + name, format_func=format_func, help=help
    )
    value = first if value is None else value  # a click on the chosen one takes the choice away
    keep(name, value)
    return value


def slide(
    label: str,
    name: str,
    options: Sequence[T],
    *,
    default: T | None = None,
    format_func: Callable[[T], str] = str,
    help: str | None = None,
    place: DeltaGenerator | None = None,
) -> T:
    """A slider over ``options``, bound to the URL's ``name``; a single option is shown as text."""
    first = options[0] if default is None else default
    if len(options) == 1:
        (place or st).text(f"{label}: {format_func(options[0])}")
        keep(name, options[0])
        return options[0]
    _follow_url(name, options, first)
    value = (place or st).select_slider(
        label, options, key=_WIDGET + name, format_func=format_func, help=help
    )
    keep(name, value)
    return value


def address(url_path: str, **params: object) -> str:
    """Relative address of a view: ``gradients?run=0a1b…&step=12``."""
    given = {key: str(value) for key, value in params.items() if value is not None}
    return f"{url_path}?{urlencode(given)}" if given else url_path


def _follow_url(name: str, options: Sequence[T], default: T) -> None:
    """Set the widget's state before it is drawn: from the URL when that changed from outside, from
    memory when the page is new, and to the default when its value is no longer on offer."""
    key = _WIDGET + name
    from_outside = name in st.query_params and st.query_params[name] != st.session_state.get(
        _MEMORY + name
    )
    if from_outside or key not in st.session_state or st.session_state[key] not in options:
        st.session_state[key] = chosen(name, options, default)
