"""Values from a file as records, by the type hints of the records' fields.

The bounds that a type cannot say are in :mod:`.bounds`.
"""

from __future__ import annotations

import dataclasses
import types
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ampscope.store.importing import bounds
from ampscope.store.importing.refusal import Refusal
from ampscope.store.importing.values import Check, boolean, fields, one_of, real, rows, text, whole

T = TypeVar("T")


def record(kind: type[T], value: object) -> T:
    """``value``, an object, as that dataclass. Unknown keys are refused; fields that have a default
    may be missing, because older versions did not write them."""
    made: T = _of_class(kind)(value)  # type: ignore[arg-type]  # a class is hashable
    return made


@cache
def _of_class(kind: type[Any]) -> Check:
    hints = get_type_hints(kind)
    checks = {f.name: _of_hint(hints[f.name], kind, f.name) for f in dataclasses.fields(kind)}
    needed = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }

    def check(value: object) -> Any:
        found = fields(value)
        values = {}
        for name, part in found.items():
            of_field = checks.get(name)
            if of_field is None:
                raise Refusal("key", _unknown(kind)).inside(name)
            try:
                values[name] = of_field(part)
            except Refusal as refusal:
                raise refusal.inside(name) from None
        for name in needed:
            if name not in values:
                raise Refusal("key", f"{name} is missing")
        return kind(**values)

    return check


def _of_hint(hint: Any, kind: type[Any], name: str) -> Check:
    """The checker of one field."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        of_value = _of_hint(inner, kind, name)
        return lambda value: None if value is None else of_value(value)
    if get_origin(hint) is tuple:
        return _of_tuple(get_args(hint), kind, name)
    if dataclasses.is_dataclass(hint):
        return _of_class(hint)  # type: ignore[arg-type]  # a class, not an instance
    if hint is bool:
        return boolean
    if issubclass(hint, Enum):
        return _of_words(hint)
    if (words := bounds.words(kind, name)) is not None:
        return one_of(words)
    if hint is str:
        return text(bounds.longest(kind, name))
    if hint is int:
        return whole(*bounds.whole(kind, name))
    if hint is float:
        limits = bounds.real(kind, name)
        return real(limits.low, limits.high, may_be_nonfinite=limits.nonfinite, above=limits.above)
    raise TypeError(f"{kind.__name__}.{name} has a type that no file can hold")


def _of_tuple(inner: tuple[Any, ...], kind: type[Any], name: str) -> Check:
    endless = len(inner) == 2 and inner[1] is Ellipsis
    parts = [_of_hint(part, kind, name) for part in inner if part is not Ellipsis]

    def check(value: object) -> tuple[Any, ...]:
        found = rows(value)
        if len(found) > bounds.MOST_POINTS:
            why = f"it has {len(found):,} values, and {bounds.MOST_POINTS:,} are read at most"
            raise Refusal("size", why)
        if not endless and len(found) != len(parts):
            raise Refusal("type", f"{len(parts)} values were expected, not {len(found):,}")
        made = []
        for place, part in enumerate(found):
            try:
                made.append(parts[0 if endless else place](part))
            except Refusal as refusal:
                raise refusal.inside(place) from None
        return tuple(made)

    return check


def _of_words(kind: type[Enum]) -> Check:
    known = {str(member.value): member for member in kind}
    one = one_of(tuple(known))
    return lambda value: known[one(value)]


def _unknown(kind: type[Any]) -> str:
    return f"a {kind.__name__} has no such field; perhaps a newer ampscope wrote the file"
