"""The frame round every page: title of the window, navigation, and a last net for errors."""

from __future__ import annotations

import logging
from pathlib import Path

import streamlit as st

from ampscope.errors import AmpscopeError
from app import states
from app.sitemap import ENTRIES, HOME, Entry

LOGO = Path(__file__).with_name("logo.svg")
logger = logging.getLogger("ampscope.dashboard")


def show() -> None:
    """Draw the page that the address names."""
    st.set_page_config(page_title="ampscope", page_icon=str(LOGO), layout="wide")
    st.logo(str(LOGO), size="large")
    sections: dict[str, list[st.Page]] = {}
    for entry in ENTRIES:
        sections.setdefault(entry.section, []).append(_page(entry))
    page = st.navigation(sections, expanded=True)
    try:
        page.run()
    except AmpscopeError as error:
        states.unreadable(str(error))
    except Exception:
        logger.exception("The page %s failed", page.title)
        states.broken(page.title)


def _page(entry: Entry) -> st.Page:
    return st.Page(entry.file, title=entry.title, icon=entry.icon, default=entry is HOME)
