"""Who may start, stop and see what. Asked where things are started and read, not by buttons alone.

                          operator  teacher  student  guest (has not signed in)
    lessons                  x         x        x
    look at shared runs      x         x        x
    everything else          x         x

Without a class every user is the operator. In a class a run is private until the teacher shares it;
what lessons measure is for all. Who cannot see a run is told that there is none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from ampscope import extensions
from ampscope.errors import AmpscopeError
from ampscope.records import RunInfo, RunSpec
from app import options, run_rows
from app.options import Classroom
from app.text import escape


class ClassRole(StrEnum):
    """The current user of the dashboard."""

    OPERATOR = "operator"  # there is no class
    TEACHER = "teacher"
    STUDENT = "student"
    GUEST = "guest"  # the class signs in, and this one has not


TRUSTED = (ClassRole.OPERATOR, ClassRole.TEACHER)


T = TypeVar("T")
_lent: ContextVar[ClassRole] = ContextVar("lent", default=ClassRole.GUEST)


class Forbidden(AmpscopeError):  # noqa: N818  # says what happened, as the others
    """A student asked for what is the teacher's."""


def role() -> ClassRole:
    """Of the user for whom this script runs."""
    classroom = options.current().classroom
    if classroom is None:
        return ClassRole.OPERATOR
    if get_script_run_ctx(suppress_warning=True) is None:
        return _lent.get()  # a thread that serves no user has the rights that it was lent
    if classroom.signs_in:
        return _signed_in(classroom)
    is_teacher = is_proven(classroom.token, _cookies(), _proof())
    return ClassRole.TEACHER if is_teacher else ClassRole.STUDENT


def lent(call: Callable[[], T]) -> Callable[[], T]:
    """``call`` with the rights of the user for whom this page is drawn. Streamlit makes a download
    in a thread that serves no user, when a user clicks; what may be seen is asked again then."""
    who = role()

    def with_rights() -> T:
        before = _lent.set(who)
        try:
            return call()
        finally:
            _lent.reset(before)

    return with_rights


def is_trusted() -> bool:
    """Whether all is allowed: the operator, or the teacher of a class."""
    return role() in TRUSTED


def may_run(spec: RunSpec) -> bool:
    """Lessons for every user; what runs code, files or for long, for the teacher."""
    return is_trusted() or (role() is ClassRole.STUDENT and spec.kind == "lesson")


def may_see(run: RunInfo) -> bool:
    """Its own row, its steps, its figures, its files."""
    return bool(visible([run]))


def visible(runs: Iterable[RunInfo]) -> tuple[RunInfo, ...]:
    """Those that this person may look at. A control goes with the run that it is a control of."""
    who = role()
    if who in TRUSTED:
        return tuple(runs)
    if who is ClassRole.GUEST:
        return ()
    shared = run_rows.shared(options.current().store)
    return tuple(
        run for run in runs if is_of_lesson(run) or run.id in shared or run.spec.parent in shared
    )


def may_see_source(run: RunInfo) -> bool:
    """Whether the user may see the text of the run's script: a class sees that of lessons alone."""
    return is_trusted() or is_of_lesson(run)


def is_of_lesson(run: RunInfo) -> bool:
    """A lesson's measurement, or a script that comes with one, which every user may see whole: they
    say nothing about any user. What a file from elsewhere calls so may be anything."""
    spec = run.spec
    is_script = spec.kind == "script" and comes_with_lesson(spec.workload) and not spec.args
    return not spec.imported and (spec.kind == "lesson" or is_script)


def comes_with_lesson(script: str) -> bool:
    """Whether a lesson brings this script along."""
    return Path(script).parent in extensions.class_scripts()


def require(allowed: bool, what: str) -> None:
    """Raise Forbidden unless ``allowed``; ``what`` is what a class leaves to its teacher."""
    if not allowed:
        raise Forbidden(
            f"Left to the teacher of this class: {what}. Lessons are open to every student."
        )


def offers(what: str) -> bool:
    """Whether a page shows the form for ``what``; where it does not, it says whose it is."""
    if is_trusted():
        return True
    st.caption(f"Left to the teacher of this class: {what}.")
    return False


PROOF_HEADER = "X-Ampscope-Proof"  # to Streamlit from app/server.py, which sets it anew
_ON_TLS = "__Host-"  # a browser takes a cookie of this name over TLS only, and for this host only


def cookie_name(token: str, *, is_https: bool = False) -> str:
    """One for each token: cookies do not tell the ports of a host apart."""
    name = f"ampscope-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
    return _ON_TLS + name if is_https else name


def cookie_value(token: str) -> str:
    """What a browser shows that has opened the link; the token does not follow from it."""
    return hmac.new(token.encode(), b"cookie", hashlib.sha256).hexdigest()


def proof_value(token: str) -> str:
    """What its page shows. The browser keeps it for one origin, port included, and sends it nowhere
    by itself: a server on another port of this host gets the cookie, and cannot use it."""
    return hmac.new(token.encode(), b"proof", hashlib.sha256).hexdigest()


def has_cookie(token: str, cookies: Mapping[str, str]) -> bool:
    """Whether the browser opened the link."""
    names = (cookie_name(token), cookie_name(token, is_https=True))
    value = cookie_value(token).encode()
    return any(secrets.compare_digest(cookies.get(name, "").encode(), value) for name in names)


def is_proven(token: str, cookies: Mapping[str, str], proof: str) -> bool:
    """Whether the browser opened the link, and the page asking is of this origin."""
    has_proof = secrets.compare_digest(proof.encode(), proof_value(token).encode())
    return has_cookie(token, cookies) and has_proof


def _cookies() -> dict[str, str]:
    return dict(st.context.cookies)


def _proof() -> str:
    return str(st.context.headers.get(PROOF_HEADER, ""))


def _signed_in(classroom: Classroom) -> ClassRole:
    """By the address that the identity provider vouches for, or by its own name for the person."""
    user = st.user
    if not user.get("is_logged_in", False):
        return ClassRole.GUEST
    address = str(user.get("email") or "").casefold()
    is_teacher = address in classroom.teachers and user.get("email_verified") is True
    is_teacher |= f"sub:{user.get('sub')}".casefold() in classroom.teachers
    return ClassRole.TEACHER if is_teacher else ClassRole.STUDENT


def show_sign_in() -> None:
    """All that a user sees who has not signed in, where the class does (OIDC through Streamlit,
    docs/classroom.md)."""
    st.title("Sign in", anchor=False)
    st.markdown("This class is open to those who have an account with the teacher's institution.")
    st.button("Sign in", type="primary", on_click=st.login)


def offer_sign_out() -> None:
    """Who is signed in, and the way out."""
    classroom = options.current().classroom
    if classroom is None or not classroom.signs_in or role() is ClassRole.GUEST:
        return
    with st.sidebar.container(horizontal=True, vertical_alignment="center"):
        st.caption(escape(str(st.user.get("email") or "signed in")), width="content")
        st.button("Sign out", type="tertiary", on_click=st.logout)
