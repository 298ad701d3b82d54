"""Observations of a script as JSON rows and back; each kind is one dataclass.

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
from ampscope.observations import BadOp, Observation, Operand
from ampscope.privacy import leaves_out
from ampscope.store import door

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Observation)}


def encode(observation: Observation) -> tuple[str, str]:
    """(kind, JSON of the fields)."""
    parts = door.storable_parts(dataclasses.asdict(observation))
    if "code" in parts and leaves_out("source"):
        parts["code"] = ""
    text = json.dumps(parts, separators=(",", ":"))
    return type(observation).__name__, text


def decode(kind: str, text: str) -> Observation:
    """Inverse of :func:`encode`. Raises StoreError for what is not an observation."""
    known = KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise StoreError(f"A stored observation is of the unknown kind {kind!r}; delete this run.")
    try:
        fields = {k: _tupled(v) for k, v in door.parsed(text).items()}
        if known is BadOp:
            fields["inputs"] = tuple(
                _built(Operand, {k: _tupled(v) for k, v in part.items()})
                for part in fields["inputs"]
            )
        result: Observation = _built(known, fields)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise StoreError(f"A stored observation is damaged ({error}); delete this run.") from error
    return result


def _built(kind: type[Any], fields: dict[str, Any]) -> Any:
    """Raises TypeError for a field of another type."""
    for name, types_ in _types(kind).items():  # type: ignore[arg-type]  # a class is hashable
        if name in fields and type(fields[name]) not in types_:
            raise TypeError(f"{name} is of type {type(fields[name]).__name__}")
    return kind(**fields)


@cache
def _types(kind: type[Any]) -> dict[str, tuple[type[Any], ...]]:
    """The types that each field may have; an int may stand for a float."""
    return {name: _of_hint(hint) for name, hint in get_type_hints(kind).items()}


def _of_hint(hint: Any) -> tuple[type[Any], ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(t for part in get_args(hint) for t in _of_hint(part))
    if get_origin(hint) is tuple:
        return (tuple,)
    return (float, int) if hint is float else (hint,)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
