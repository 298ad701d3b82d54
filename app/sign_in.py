"""Sign in and out, where the class does (OIDC through Streamlit, docs/classroom.md)."""

from __future__ import annotations

import streamlit as st

from app import options, permissions
from app.permissions import Role
from app.text import escape


def show() -> None:
    """All that somebody sees who has not signed in."""
    st.title("Sign in", anchor=False)
    st.markdown("This class is open to those who have an account with the teacher's institution.")
    st.button("Sign in", type="primary", on_click=st.login)


def offer_out() -> None:
    """Who is signed in, and the way out."""
    classroom = options.current().classroom
    if classroom is None or not classroom.signs_in or permissions.role() is Role.GUEST:
        return
    with st.sidebar.container(horizontal=True, vertical_alignment="center"):
        st.caption(escape(str(st.user.get("email") or "signed in")), width="content")
        st.button("Sign out", type="tertiary", on_click=st.logout)
