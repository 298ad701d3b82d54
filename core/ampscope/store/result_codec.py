"""Results of measurements as JSON rows and back, by the type hints of their dataclasses.

JSON has no NaN and no infinity: Python's own spelling (NaN, Infinity) is used, which
``json.loads`` reads back.
"""

from __future__ import annotations

import dataclasses
import json
import types
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from ampscope.errors import StoreError
from ampscope.records import RESULT_KINDS, Result
from ampscope.store import door

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in RESULT_KINDS}


def encode(record: Result) -> tuple[str, str]:
    """(kind, JSON of the fields)."""
    parts = door.storable_parts(dataclasses.asdict(record))
    text = json.dumps(parts, separators=(",", ":"))
    return type(record).__name__, text


def decode(kind: str, text: str) -> Result:
    """Inverse of :func:`encode`. Raises StoreError for what is no such record."""
    known = KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise StoreError(f"A stored result is of the unknown kind {kind!r}; delete this run.")
    try:
        record: Result = _built(known, door.parsed(text))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise StoreError(f"A stored result is damaged ({error}); delete this run.") from error
    return record


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _built(wanted: Any, value: Any) -> Any:
    """``value`` as the type hint says. Raises TypeError where it cannot be that."""
    if dataclasses.is_dataclass(wanted):
        hints = _hints(wanted)  # type: ignore[arg-type]  # a class, not an instance
        fields = {name: _built(hints[name], part) for name, part in value.items() if name in hints}
        return wanted(**fields)  # type: ignore[operator]  # likewise
    if get_origin(wanted) in (Union, types.UnionType):
        parts = [part for part in get_args(wanted) if part is not type(None)]
        return None if value is None else _built(parts[0], value)
    if get_origin(wanted) is tuple:
        inner = get_args(wanted)
        if not isinstance(value, list):
            raise TypeError(f"a list was expected, not {type(value).__name__}")
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_built(inner[0], part) for part in value)
        return tuple(_built(t, part) for t, part in zip(inner, value, strict=True))
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise TypeError(f"{wanted.__name__} was expected, not {type(value).__name__}")
    return value
