"""A class in a test: the server's environment, and a browser of the teacher's or of a student's."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from app import options, permissions

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-that-no-student-knows"  # of the tests


class Class:
    """``Class(monkeypatch).student().page("home")``"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.setenv(options.TOKEN, TOKEN)
        self.student()

    def student(self) -> Class:
        """The browser has no cookie."""
        self._patch.setattr(permissions, "_cookies", dict)
        self._patch.setattr(permissions, "_proof", str)
        return self

    def teacher(self) -> Class:
        """The browser has opened the teacher's link."""
        cookie = {permissions.cookie_name(TOKEN): permissions.cookie_value(TOKEN)}
        self._patch.setattr(permissions, "_cookies", lambda: cookie)
        self._patch.setattr(permissions, "_proof", lambda: permissions.proof_value(TOKEN))
        return self

    def page(self, page: str, **query: object) -> AppTest:
        """Run once, through the real frame."""
        app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60)
        if page != "home":
            app._page_hash = calc_hash(page)  # switch_page() knows pages with a file alone
        for name, value in query.items():
            app.query_params[name] = str(value)
        return app.run()


def said(app: AppTest) -> str:
    """Every text, label, option and address on the page."""
    return "\n".join(
        str(getattr(e, "proto", "")) + str(getattr(e, "value", "")) for e in every(app)
    )


def every(app: AppTest) -> list[object]:
    found: list[object] = []
    todo = list(app._tree.children.values())
    while todo:
        block = todo.pop()
        found.append(block)
        todo.extend(getattr(block, "children", {}).values())
    return found
