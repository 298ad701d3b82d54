"""The bytes of a file as JSON values. Whatever JSON allows and an export never holds (a key twice,
NaN, numbers beyond 64 bits) becomes :class:`Unreadable`, so that it is refused by its place.

What a file may hold is bounded before anything is made of it, by its size and by the number of
its commas and brackets: whatever is let in takes less than 300 MB and 10 s
(docs/decisions/0014-what-an-import-checks.md).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ampscope.errors import BadInput
from ampscope.store import db
from ampscope.store.importing.refusal import Refusal, quoted

MAX_BYTES = 16 * 2**20
MAX_VALUES = 1_200_000  # by commas, those in texts too; an int in a dict takes about 100 bytes
MAX_KEYS = 1_000  # of one object; a histogram has at most 284
MAX_PARTS = 250_000  # lists and objects: a dict of its own takes 200 bytes and more
_MERGE = "Runs as large as that are handed on as a store: ampscope runs merge"
MAX_DIGITS = 19  # of a whole number: what 64 bits hold


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that is JSON and still cannot be used."""

    sort: str
    why: str


def read(path: Path) -> object:
    """The file's value. Raises Refusal for what is not JSON, BadInput for what is no file."""
    try:
        if not path.is_file():
            what = "is no ordinary file" if path.exists() else "does not exist"
            raise BadInput(f"{path} {what}.")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise Refusal("size", _too_large(size))
        if size and db.is_database(path):  # it may be in use here, and is not opened beside that
            raise Refusal("encoding", "it is a database, not JSON")
        # What the system makes up (/proc/kmsg) has no size, and reading it may wait for ever.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(opened, "rb") as file:
            content = file.read(min(size, MAX_BYTES) + 1) if size else b""
    except OSError as error:
        raise BadInput(f"Cannot read {path}: {error.strerror or error}.") from error
    if len(content) > MAX_BYTES:
        raise Refusal("size", _too_large(len(content)))
    return parsed(content)


def parsed(content: bytes) -> object:
    """The value of a file's content."""
    _check_counts(content)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal("encoding", f"byte {error.start:,} is not UTF-8") from None
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_float,
            parse_constant=_constant,
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno:,}, column {error.colno:,}"
        raise Refusal("json", f"it is not JSON at {where}: {error.msg}") from None
    except RecursionError:
        raise Refusal("depth", "its lists and objects are nested too deep") from None


def _check_counts(content: bytes) -> None:
    values, parts = content.count(b","), content.count(b"{") + content.count(b"[")
    for found, most, what in (
        (values, MAX_VALUES, "values"),
        (parts, MAX_PARTS, "lists and objects"),
    ):
        if found > most:
            raise Refusal(
                "size", f"it has {found:,} {what}, and {most:,} are read at most. {_MERGE}"
            )


def _object(pairs: list[tuple[str, object]]) -> object:
    if len(pairs) > MAX_KEYS:
        return Unreadable("size", f"{len(pairs):,} keys are more than any object of an export has")
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return Unreadable("duplicate", f"the key {quoted(key)} stands in it twice")
        seen.add(key)
    return found


def _whole(text: str) -> int | Unreadable:
    if len(text) > MAX_DIGITS + 1:
        return Unreadable("number", f"a number of {len(text):,} digits is too large")
    return int(text)


def _float(text: str) -> float | Unreadable:
    value = float(text)
    if value - value != 0:
        return Unreadable("number", f'{quoted(text)} is too large; infinity is written "inf"')
    return value


def _constant(name: str) -> Unreadable:
    return Unreadable("number", f"{name} is not JSON; an export writes it as a text")


def _too_large(size: int) -> str:
    return f"it has {size / 2**20:,.1f} MiB, and {MAX_BYTES // 2**20} are read at most. {_MERGE}"
