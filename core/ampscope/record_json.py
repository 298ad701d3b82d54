"""Records (dataclasses) as JSON and back: numbers that JSON has not, and values checked by the type
hints of the fields they go to.

    >>> dumps({"loss": float("nan")})
    '{"loss": "nan"}'
    >>> from ampscope.records import ScalerSpec
    >>> Decoder().record(ScalerSpec, {"init_scale": 8.0}).init_scale
    8.0

Who reads a file decides how much it is trusted: :class:`Decoder` checks types, which is enough for
what ampscope has written for itself; the store adds bounds, and an import adds many more
(:mod:`ampscope.store.importing.values`).

JSON has neither NaN nor infinity. What is written for others spells them as the texts "nan", "inf"
and "-inf" (:func:`finite`), which every parser reads. Columns of JSON in the store, and capsules,
keep Python's own spelling, NaN and Infinity: ampscope alone reads those, and what is a number there
stays one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import types
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from ampscope.errors import BadInput

T = TypeVar("T")
Check = Callable[[object], Any]
NONFINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # by their spelling


def finite(value: Any) -> Any:
    """``value`` with the text of :data:`NONFINITE` for every number in it that is not finite, in
    dicts, lists and tuples at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def dumps(content: object, **options: Any) -> str:
    """JSON for other programs, which may read only what the standard has; ``options`` are those of
    :func:`json.dumps`."""
    return json.dumps(finite(content), allow_nan=False, **options)


class Refusal(BadInput):
    """Raised at the value that is wrong; what holds it puts its own name in front on the way up.

    ``sort`` is one word for counting: type, value, key, duplicate, reference, text, json, …
    """

    SHOWN = 60  # characters of a text from a file that a sentence quotes

    def __init__(self, sort: str, why: str) -> None:
        super().__init__(why)
        self.sort = sort
        self.why = why
        self.place = ""

    def inside(self, name: str | int) -> Refusal:
        """This refusal, with ``name`` put before its path."""
        part = f"[{name}]" if isinstance(name, int) else _quoted_name(name)
        separator = "." if self.place and not self.place.startswith("[") else ""
        self.place = f"{part}{separator}{self.place}"
        return self

    def __str__(self) -> str:
        return f"{self.place}: {self.why}" if self.place else self.why


def quoted(value: object) -> str:
    """A value from a file in a sentence: short, and nothing in it can move the cursor."""
    text = ascii(value)
    return text if len(text) <= Refusal.SHOWN else f"{text[: Refusal.SHOWN]}..."


def _quoted_name(name: str) -> str:
    """A key as part of a place."""
    is_plain = name.isidentifier() and name.isascii() and len(name) <= Refusal.SHOWN
    return name if is_plain else quoted(name)


class Decoder:
    """Makes records of plain values by the type hints of their fields: numbers, texts, booleans,
    tuples and records of these, and None where a hint allows it.

    Unknown keys come from a newer minor version and are left out; a missing one takes its default.
    Raises :class:`Refusal` with the place of what does not fit.
    """

    most_values = math.inf  # of one tuple

    def __init__(self) -> None:
        self._checks: dict[type[Any], Check] = {}

    def record(self, kind: type[T], value: object) -> T:
        """``value``, an object, as that dataclass."""
        made: T = self._of_class(kind)(value)
        return made

    def unlike(self, wanted: str, value: object) -> Refusal:
        """What is said of a value of another type."""
        return Refusal("type", f"is of type {type(value).__name__}")

    def unknown(self, kind: type[Any]) -> Refusal | None:
        """What is said of a key that the class has not; None where it is left out."""
        return None

    def plain(self, hint: type[Any], kind: type[Any], name: str) -> Check:
        """The check of a field that is no tuple and no record. An int may stand for a float."""
        allowed = (float, int) if hint is float else (hint,)

        def check(value: object) -> object:
            if type(value) not in allowed:
                raise self.unlike(hint.__name__, value)
            return value

        return check

    def _of_class(self, kind: type[Any]) -> Check:
        if kind not in self._checks:
            self._checks[kind] = partial(self.record, kind)  # a class may hold itself
            self._checks[kind] = self._new(kind)
        return self._checks[kind]

    def _new(self, kind: type[Any]) -> Check:
        hints = get_type_hints(kind)
        declared = dataclasses.fields(kind)
        checks = {f.name: self._of_hint(hints[f.name], kind, f.name) for f in declared}
        missing = dataclasses.MISSING
        needed = [f.name for f in declared if f.default is missing and f.default_factory is missing]

        def check(value: object) -> Any:
            if not isinstance(value, dict):
                raise self.unlike("an object", value)
            values = {}
            for name, part in value.items():
                of_field = checks.get(name)
                if of_field is None:
                    if (refusal := self.unknown(kind)) is not None:
                        raise refusal.inside(name)
                    continue
                try:
                    values[name] = of_field(part)
                except Refusal as refusal:
                    raise refusal.inside(name) from None
            for name in needed:
                if name not in values:
                    raise Refusal("key", f"{name} is missing")
            return kind(**values)

        return check

    def _of_hint(self, hint: Any, kind: type[Any], name: str) -> Check:
        """The check of one field."""
        if get_origin(hint) in (Union, types.UnionType):
            inner = [part for part in get_args(hint) if part is not type(None)]
            if len(inner) > 1:  # of JSON's own types, such as a number or a text
                return self._of_several(inner, kind, name, or_none=type(None) in get_args(hint))
            of_value = self._of_hint(inner[0], kind, name)
            return lambda value: None if value is None else of_value(value)
        if get_origin(hint) is tuple:
            return self._of_tuple(get_args(hint), kind, name)
        if dataclasses.is_dataclass(hint):
            return self._of_class(hint)  # type: ignore[arg-type]  # a class, not an instance
        return self.plain(hint, kind, name)

    def _of_several(
        self, hints: list[type[Any]], kind: type[Any], name: str, *, or_none: bool
    ) -> Check:
        checks = [self._of_hint(hint, kind, name) for hint in hints]

        def check(value: object) -> Any:
            if value is None and or_none:
                return None
            for of_hint in checks[:-1]:
                with contextlib.suppress(Refusal):
                    return of_hint(value)
            return checks[-1](value)

        return check

    def _of_tuple(self, inner: tuple[Any, ...], kind: type[Any], name: str) -> Check:
        endless = len(inner) == 2 and inner[1] is Ellipsis
        parts = [self._of_hint(part, kind, name) for part in inner if part is not Ellipsis]

        def check(value: object) -> tuple[Any, ...]:
            if not isinstance(value, list):
                raise self.unlike("a list", value)
            if len(value) > self.most_values:
                most = f"{self.most_values:,} are read at most"
                raise Refusal("size", f"it has {len(value):,} values, and {most}")
            if not endless and len(value) != len(parts):
                raise Refusal("type", f"{len(parts)} values were expected, not {len(value):,}")
            made = []
            for place, part in enumerate(value):
                try:
                    made.append(parts[0 if endless else place](part))
                except Refusal as refusal:
                    raise refusal.inside(place) from None
            return tuple(made)

        return check
