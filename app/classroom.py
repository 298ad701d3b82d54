"""Entry of a class: app/main.py, and the address that makes a browser the teacher's.

    AMPSCOPE_CLASSROOM_TOKEN=… streamlit run app/classroom.py

    GET /teacher/TOKEN  ->  a cookie for this browser, and on to the dashboard

The token is exchanged here, before a page is drawn: it never stands in the dashboard's address bar
nor in its history. The cookie cannot be read by a script (HttpOnly), is not sent from other sites'
pages (SameSite), and lasts until the browser is closed, so that a reload keeps the teacher.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import streamlit
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

_HERE = Path(__file__).resolve().parent
if str(_HERE.parent) not in sys.path:
    # In place of app/ itself, whose module names are not meant for the top level.
    sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if p != str(_HERE))]

from app import options, permissions  # noqa: E402  - needs the path set above

WRONG = "This is not the teacher's link of this class. The terminal that runs it shows the link."


async def become_teacher(request: Request) -> Response:
    """The teacher's link, opened in a browser."""
    classroom = options.classroom(os.environ)
    token = classroom.token if classroom is not None and not classroom.signs_in else ""
    given = str(request.path_params["token"])
    if not token or not secrets.compare_digest(given.encode(), token.encode()):
        return PlainTextResponse(WRONG, status_code=403)
    answer = RedirectResponse(f"{_base()}/", status_code=303)
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["Referrer-Policy"] = "no-referrer"
    answer.set_cookie(
        permissions.cookie_name(token),
        permissions.cookie_value(token),
        path=f"{_base()}/",
        secure=_is_https(request),
        httponly=True,
        samesite="strict",
    )
    return answer


def _base() -> str:
    path = str(streamlit.get_option("server.baseUrlPath") or "").strip("/")
    return f"/{path}" if path else ""


def _is_https(request: Request) -> bool:
    """Also behind a proxy that speaks http to us. A browser that lies harms its own cookie only."""
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))


app = streamlit.App(
    _HERE / "main.py", routes=[Route(f"{_base()}/teacher/{{token}}", become_teacher)]
)
