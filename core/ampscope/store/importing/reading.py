"""The bytes of a file as JSON values. Whatever JSON allows and an export never holds (a key twice,
NaN, numbers beyond 64 bits) becomes :class:`Unreadable`, so that it is refused by its place.

The limit on the size is one on memory: 64 MiB of an export take up to 0.8 GiB while they are
checked, and the worst that 64 MiB of JSON can do is 2.0 GiB, which a laptop has
(docs/decisions/0014-what-an-import-checks.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ampscope.errors import BadInput
from ampscope.store.importing.refusal import Refusal, quoted

MAX_BYTES = 64 * 2**20
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
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"Cannot read {path}: {error.strerror or error}.") from error
    if len(content) > MAX_BYTES:
        raise Refusal("size", _too_large(len(content)))
    return parsed(content)


def parsed(content: bytes) -> object:
    """The value of a file's content."""
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


def _object(pairs: list[tuple[str, object]]) -> object:
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
    return (
        f"it has {size / 2**20:,.1f} MiB, and {MAX_BYTES // 2**20} are read at most. Runs as large "
        "as that are handed on as a store: ampscope runs merge"
    )
