"""The one way in which HTML is made: elements whose texts and attributes are always escaped.

    element("td", run.label, class_="name")      ->  <td class="name">…</td>

A string is text, never markup; markup comes from :func:`element` alone. There is no way to write an
event handler or an inline style, and an address is one of our own or a place in this file.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass

from ampscope.report.plain import visible

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*\Z")
_ADDRESS = re.compile(r"(#[a-z0-9-]+|https://[a-z0-9./_-]+)\Z")
_VOID = {"meta", "br", "col"}
_REFUSED = {"style", "script", "iframe", "object", "embed", "base", "form", "link"}
WHOLE = 10**9  # a text whose block has cut it already


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that is safe to put anywhere in a body."""

    html: str


Child = Markup | str | None


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """One element. Attribute names take a trailing or inner underscore for Python's sake."""
    if not _NAME.match(tag) or tag.lower() in _REFUSED:
        raise ValueError(f"<{tag}> is no element of a report")
    start = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{start}>")
    return Markup(f"<{tag}{start}>{joined(*children).html}</{tag}>")


def joined(*children: Child) -> Markup:
    """Elements and texts one after the other."""
    return Markup("".join(_child(child) for child in children))


def data(identifier: str, value: object) -> Markup:
    """Numbers and texts for the script, as JSON that no parser of HTML can take for anything else:
    ``<``, ``>`` and ``&`` are spelled as escapes (html.spec.whatwg.org, restrictions for contents
    of script elements). It is data: a browser does not run it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    name = html.escape(identifier)
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')


def _child(child: Child) -> str:
    if child is None:
        return ""
    return child.html if isinstance(child, Markup) else html.escape(visible(child, WHOLE))


def _attribute(name: str, value: str | float | bool | None) -> str:
    name = name.rstrip("_").replace("_", "-")
    if not _NAME.match(name) or name.lower().startswith("on") or name.lower() == "style":
        raise ValueError(f"{name} is no attribute of a report")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    text = visible(value, WHOLE) if isinstance(value, str) else f"{value:.10g}"
    if name in ("href", "src", "action") and not _ADDRESS.match(text):
        raise ValueError(f"{text!r} is no address of a report")
    return f' {name}="{html.escape(text)}"'
