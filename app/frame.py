"""The frame round every page: title of the window, navigation, and a last net for errors."""

from __future__ import annotations

import logging
from pathlib import Path

import streamlit as st

from ampscope.errors import AmpscopeError, StoreBusy
from app import permissions, sign_in, states
from app.permissions import Role
from app.sitemap import CLASSROOM, ENTRIES, HOME, NEW_PROBE, Entry

LOGO = Path(__file__).with_name("logo.svg")
# Streamlit writes what is chosen in the theme's primary colour, which carries white text elsewhere
# and so is too dark to be read as text on a dark page. Border and line show the choice as well.
# A table's own button for CSV is not drawn: the browser writes that file, with the cells as they
# are, and a spreadsheet would take a text of a run that begins with "=" for a formula. What is
# downloaded elsewhere is escaped (app.text.for_csv).
STYLE = """<style>
button[aria-label^="Download as CSV"] { display: none; }
[data-testid="stButtonGroup"] [data-selected="true"],
[role="tab"][aria-selected="true"] { color: inherit !important; }
</style>"""
logger = logging.getLogger("ampscope.dashboard")


def show() -> None:
    """Draw the page that the address names."""
    st.set_page_config(page_title="ampscope", page_icon=str(LOGO), layout="wide")
    st.logo(str(LOGO), size="large")
    st.html(STYLE)
    try:
        who = permissions.role()
    except AmpscopeError as error:  # the operator's options
        states.unreadable(str(error))
        return
    sections: dict[str, list[st.Page]] = {}
    for entry in ENTRIES:
        sections.setdefault(entry.section, []).append(_page(entry, who))
    page = st.navigation(sections, expanded=True)
    if who is Role.GUEST:  # its address is known to the browser, its content is not drawn
        sign_in.show()
        return
    sign_in.offer_out()
    try:
        page.run()
    except StoreBusy as error:
        states.busy(str(error))
    except AmpscopeError as error:
        states.unreadable(str(error))
    except Exception:
        logger.exception("The page %s failed", page.title)
        states.broken(page.title)


def _is_hidden(entry: Entry, who: Role) -> bool:
    """What is of no use to this person is not in the navigation; its address still answers."""
    if who is Role.GUEST:
        return True
    if entry is CLASSROOM:
        return who is not Role.TEACHER
    return entry is NEW_PROBE and who not in permissions.TRUSTED


def _page(entry: Entry, who: Role) -> st.Page:
    return st.Page(
        entry.file,
        title=entry.title,
        icon=entry.icon,
        default=entry is HOME,
        visibility="hidden" if _is_hidden(entry, who) else "visible",
    )
