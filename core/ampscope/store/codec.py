"""Values as the store holds them, and back. What does not fit is refused.

RunSpec, Machine, results of measurements and observations of a script go through JSON by the type
hints of their dataclasses. Every column goes through one door (:func:`to_column` and the readers
below it): texts that UTF-8 can hold, NaN as a text, and :class:`Damaged` for all else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ampscope.errors import StoreError
from ampscope.observations import BadOp, Observation, Operand
from ampscope.privacy import leaves_out, masked, recorded_text, recorded_traceback
from ampscope.records import RESULT_KINDS, Cadence, Machine, Result, RunSpec, ScalerSpec

T = TypeVar("T")
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
NESTED: dict[str, type] = {"ScalerSpec": ScalerSpec, "Cadence": Cadence}  # by declared type


def to_json(record: RunSpec | Machine) -> str:
    """Compact JSON; keys in the order of the fields."""
    if isinstance(record, RunSpec):
        record = replace(record, args=masked(record.args))
    return json.dumps(storable_parts(dataclasses.asdict(record)), separators=(",", ":"))


def spec_from_json(text: str) -> RunSpec:
    """Raises StoreError for text that is no RunSpec."""
    return _build(RunSpec, _parsed(text))


def machine_from_json(text: str | None) -> Machine | None:
    """None for a run that has not started."""
    return None if text is None else _build(Machine, _parsed(text))


def _parsed(text: str) -> dict[str, Any]:
    try:
        data = parsed(text)
    except ValueError as error:
        raise _damaged(str(error)) from error
    if not isinstance(data, dict):
        raise _damaged("its spec is not an object")
    return data


def _build(kind: type[T], data: dict[str, Any]) -> T:
    """Unknown keys come from a newer minor version and are left out; missing ones take defaults."""
    declared = {f.name: str(f.type) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    values = {k: v for k, v in data.items() if k in declared}
    for name, value in values.items():
        if declared[name] in NESTED and isinstance(value, dict):
            values[name] = _build(NESTED[declared[name]], value)
    if "args" in values:
        values["args"] = _texts(values["args"])
    if "settings" in values:
        values["settings"] = _pairs(values["settings"])
    try:
        record = kind(**values)
    except TypeError as error:
        raise _damaged(str(error)) from error
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # as above
        _check_type(field, getattr(record, field.name))
    return record


def _texts(items: Any) -> tuple[str, ...]:
    if not isinstance(items, list) or not all(type(item) is str for item in items):
        raise _damaged("args are not texts")
    return masked(items)  # older versions stored what they were given


def _pairs(items: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(items, list):
        raise _damaged("settings are not pairs of texts")
    for item in items:
        if not (isinstance(item, list) and len(item) == 2 and all(type(t) is str for t in item)):
            raise _damaged("settings are not pairs of texts")
    return tuple((name, value) for name, value in items)


def _check_type(field: dataclasses.Field[Any], value: object) -> None:
    """Fields of these records are declared with one plain type; an int may stand for a float."""
    declared = str(field.type)
    wanted = (NESTED[declared],) if declared in NESTED else _PLAIN.get(declared)
    if wanted is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
        raise _damaged(f"{field.name} is of type {type(value).__name__}")
    if (isinstance(value, float) and not math.isfinite(value)) or (
        isinstance(value, int) and not -MOST <= value <= MOST
    ):
        raise _damaged(f"{field.name} is out of bounds")


def _damaged(how: str) -> StoreError:
    return StoreError(f"The store holds a damaged run ({how}); delete this run.")


# Results of measurements as JSON rows and back, by the type hints of their dataclasses.
#
# JSON has no NaN and no infinity: Python's own spelling (NaN, Infinity) is used, which
# ``json.loads`` reads back.


_STORED_NAMES = {  # of classes that are called otherwise on disk and in exports
    "BatchTrial": "BatchTry",
    "Matmul": "Product",
    "NonFiniteCounts": "Tally",
    "StepMatmuls": "StepProducts",
    "UnderflowCounts": "Fates",
}


def stored_name(kind: type[Any]) -> str:
    """What a record's class is called on disk and in exports."""
    return _STORED_NAMES.get(kind.__name__, kind.__name__)


RESULT_CLASSES: dict[str, type[Any]] = {stored_name(kind): kind for kind in RESULT_KINDS}


def encode_result(record: Result) -> tuple[str, str]:
    """(kind, JSON of the fields)."""
    parts = storable_parts(dataclasses.asdict(record))
    text = json.dumps(parts, separators=(",", ":"))
    return stored_name(type(record)), text


def decode_result(kind: str, text: str) -> Result:
    """Inverse of :func:`encode_result`. Raises StoreError for what is no such record."""
    known = RESULT_CLASSES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise StoreError(f"A stored result is of the unknown kind {kind!r}; delete this run.")
    try:
        record: Result = _built_result(known, parsed(text))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise StoreError(f"A stored result is damaged ({error}); delete this run.") from error
    return record


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _built_result(wanted: Any, value: Any) -> Any:
    """``value`` as the type hint says. Raises TypeError where it cannot be that."""
    if dataclasses.is_dataclass(wanted):
        hints = _hints(wanted)  # type: ignore[arg-type]  # a class, not an instance
        fields = {
            name: _built_result(hints[name], part) for name, part in value.items() if name in hints
        }
        return wanted(**fields)  # type: ignore[operator]  # likewise
    if get_origin(wanted) in (Union, types.UnionType):
        parts = [part for part in get_args(wanted) if part is not type(None)]
        return None if value is None else _built_result(parts[0], value)
    if get_origin(wanted) is tuple:
        inner = get_args(wanted)
        if not isinstance(value, list):
            raise TypeError(f"a list was expected, not {type(value).__name__}")
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_built_result(inner[0], part) for part in value)
        return tuple(_built_result(t, part) for t, part in zip(inner, value, strict=True))
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise TypeError(f"{wanted.__name__} was expected, not {type(value).__name__}")
    return value


# Observations of a script as JSON rows and back; each kind is one dataclass.
#
# JSON has no NaN and no infinity: Python's own spelling (NaN, Infinity) is used, which
# ``json.loads`` reads back.


OBSERVATION_CLASSES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Observation)}


def encode_observation(observation: Observation) -> tuple[str, str]:
    """(kind, JSON of the fields)."""
    parts = storable_parts(dataclasses.asdict(observation))
    if "code" in parts and leaves_out("source"):
        parts["code"] = ""
    text = json.dumps(parts, separators=(",", ":"))
    return type(observation).__name__, text


def decode_observation(kind: str, text: str) -> Observation:
    """Inverse of :func:`encode_observation`. Raises StoreError for what is not an observation."""
    known = OBSERVATION_CLASSES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise StoreError(f"A stored observation is of the unknown kind {kind!r}; delete this run.")
    try:
        fields = {k: _tupled(v) for k, v in parsed(text).items()}
        if known is BadOp:
            fields["inputs"] = tuple(
                _built_observation(Operand, {k: _tupled(v) for k, v in part.items()})
                for part in fields["inputs"]
            )
        result: Observation = _built_observation(known, fields)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise StoreError(f"A stored observation is damaged ({error}); delete this run.") from error
    return result


def _built_observation(kind: type[Any], fields: dict[str, Any]) -> Any:
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


# The one door for every value that goes into a store or comes out of it.
#
# In: a name that is no valid UTF-8 (a file called ``caf\xff.py``) is spelled with backslashes, a
# text is cut to a length that a page can show. Out: a text is a text, a number is a number within
# bounds. What is neither raises :class:`Damaged`, which :mod:`.rows` turns into one sentence.


LONGEST = 10_000  # characters: the longest names and messages of real runs have a few hundred
LONGEST_TRACEBACK = 100_000
MOST = 2**63 - 1  # what a column of SQLite holds
LAST_TIME = 253_402_300_799.0  # the year 9999, where the calendar of Python ends
MOST_PID = 2**31 - 1  # larger ones overflow kill(2)
_JSON = {"spec", "machine", "data"}  # columns whose texts went through :func:`storable_parts`
_LONG = {"traceback": LONGEST_TRACEBACK}


class Damaged(ValueError):  # noqa: N818  # says what it found
    """A stored value that nothing of ampscope writes."""


def storable(text: str, longest: int = LONGEST) -> str:
    """``text`` as UTF-8 can hold it, both ends of it where it is too long.

    Half characters, which a name may have in Python and not in UTF-8, are spelled: ``\\udcff``.
    """
    text = recorded_text(text)
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= longest:
        return text
    left_out = len(text) - longest
    half = longest // 2 - 25
    return f"{text[:half]} […{left_out:,} characters left out…] {text[-half:]}"


def storable_parts(value: Any) -> Any:
    """``value``, made of JSON's types, with every text in it storable."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {
            (storable(key) if isinstance(key, str) else key): storable_parts(part)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [storable_parts(part) for part in value]
    return value


def parsed(text_: object) -> Any:
    """The JSON of a column, with every text in it storable. Raises Damaged, or ValueError."""
    if type(text_) is not str:
        raise Damaged(f"{_shown(text_)} stands where JSON belongs")
    try:
        value = json.loads(text_)
    except RecursionError:
        raise Damaged("its lists and objects are nested too deep") from None
    # Half characters are written as escapes; a text that is too long makes the whole so.
    is_plain = len(text_) <= LONGEST and "\\u" not in text_ and text_.isascii()
    return value if is_plain else storable_parts(value)


def to_column(name: str, value: object) -> object:
    """A value of any column on its way in. SQLite stores a REAL NaN as NULL, so NaN is a text."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if not isinstance(value, str) or name in _JSON:
        return value
    if name == "traceback":
        value = recorded_traceback(value)
    return storable(value, _LONG.get(name, LONGEST))


def decoded(raw: bytes) -> str:
    """A text of SQLite's, whatever bytes another program has put there."""
    return raw.decode("utf-8", "backslashreplace")


def text(value: object, longest: int = LONGEST) -> str:
    """A text out of a column."""
    if type(value) is not str:
        raise Damaged(f"{_shown(value)} stands where a text belongs")
    return value if len(value) <= longest and value.isascii() else storable(value, longest)


def whole(value: object, low: int = 0, high: int = MOST) -> int:
    """A whole number out of a column."""
    if type(value) is not int:
        raise Damaged(f"{_shown(value)} stands where a whole number belongs")
    if not low <= value <= high:
        raise Damaged(f"{value} is out of bounds")
    return value


def whole_or_none(value: object, low: int = 0, high: int = MOST) -> int | None:
    """The same; None was not recorded."""
    return None if value is None else whole(value, low, high)


def real(value: object) -> float | None:
    """A number out of a column: finite or not; None was not recorded."""
    if value is None:
        return None
    if value == "nan":
        return math.nan
    if type(value) is not float and type(value) is not int:
        raise Damaged(f"{_shown(value)} stands where a number belongs")
    return float(value)


def moment(value: object) -> float | None:
    """Seconds since 1970 out of a column, which a calendar can show."""
    found = real(value)
    if found is not None and not 0 <= found <= LAST_TIME:
        raise Damaged(f"{found:g} is no time")
    return found


def blob(value: object) -> bytes:
    """Bytes out of a column."""
    if type(value) is not bytes:
        raise Damaged(f"{_shown(value)} stands where bytes belong")
    return value


def _shown(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
