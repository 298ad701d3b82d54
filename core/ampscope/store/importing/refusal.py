"""Why a file is refused, and where in it."""

from __future__ import annotations

from ampscope.errors import BadInput

SHOWN = 60  # characters of a text from the file that a sentence quotes


class Refusal(BadInput):
    """Raised at the value that is wrong; what holds it puts its own name in front on the way up.

    ``sort`` is one word for counting: type, value, key, duplicate, reference, text, json, …
    """

    def __init__(self, sort: str, why: str) -> None:
        super().__init__(why)
        self.sort = sort
        self.why = why
        self.place = ""

    def inside(self, name: str | int) -> Refusal:
        """The same refusal, one level further out."""
        part = f"[{name}]" if isinstance(name, int) else quoted_name(name)
        separator = "." if self.place and not self.place.startswith("[") else ""
        self.place = f"{part}{separator}{self.place}"
        return self

    def __str__(self) -> str:
        return f"{self.place}: {self.why}" if self.place else self.why


def quoted(value: object) -> str:
    """A value from the file in a sentence: short, and nothing in it can move the cursor."""
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def quoted_name(name: str) -> str:
    """A key as part of a place."""
    return name if name.isidentifier() and name.isascii() and len(name) <= SHOWN else quoted(name)


def what(value: object) -> str:
    """The kind of a JSON value, in words."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text"}
    kinds |= {list: "a list", dict: "an object", type(None): "nothing (null)"}
    return kinds.get(type(value), "something else")
