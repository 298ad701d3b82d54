"""What a page under AppTest shows: its words, metrics, links and address."""

from __future__ import annotations

from typing import Any

NO_RUN = "No run has been recorded yet."  # on every page of a run


def texts(app: Any) -> str:
    """All words of a page, with Markdown's escapes taken out."""
    kinds = ("title", "subheader", "markdown", "caption", "info", "success", "warning", "error")
    words = " ".join(e.value for kind in kinds for e in app.get(kind))
    return words.replace("\\", "").replace("\u2060", "")


def asked(app: Any, name: str) -> str:
    """A parameter of the address; AppTest keeps it as a text or as a list of one."""
    value = app.query_params[name]
    return value if isinstance(value, str) else value[0]


def metrics(app: Any) -> dict[str, str]:
    return {m.label: m.value for m in app.metric}


def links(app: Any) -> list[tuple[str, str]]:
    """(label, query) of every link."""
    found = app.get("page_link")
    unescaped = {ord("\\"): "", 0x2060: ""}
    return [(e.proto.label.translate(unescaped), e.proto.query_string) for e in found]
