"""Values as the store holds them, and back. What does not fit is refused.

RunSpec, Machine, results of measurements and observations of a script are columns of JSON
(:mod:`ampscope.record_json`), in which NaN and infinities are spelled as Python does. Every column
goes through one door (:func:`to_column` and the readers below it): texts that UTF-8 can hold, NaN
as a text, and :class:`Damaged` for all else.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

from ampscope.errors import StoreError
from ampscope.masks import masked, masked_forms
from ampscope.observations import Observation
from ampscope.privacy import (
    leaves_out,
    recorded_place,
    recorded_source,
    recorded_text,
    recorded_traceback,
)
from ampscope.record_json import Check, Decoder, Refusal
from ampscope.records import RESULT_KINDS, Machine, Result, RunSpec
from ampscope.secret_forms import known_forms

T = TypeVar("T")
KEPT = 4_096  # specs and machines that have been read, by their texts
LONGEST = 10_000  # characters: the longest names and messages of real runs have a few hundred
LONGEST_TRACEBACK = 100_000
LONGEST_CONCLUSION = 1_000_000
MOST = 2**63 - 1  # what a column of SQLite holds
LAST_TIME = 253_402_300_799.0  # the year 9999, where the calendar of Python ends
MOST_PID = 2**31 - 1  # larger ones overflow kill(2)
_JSON = {"spec", "machine", "data"}  # columns whose texts went through :func:`storable_parts`
_COLUMNS_OF_NAMES = {"module path", "op", "parameter", "shared_with", "type"}
_LONG = {"traceback": LONGEST_TRACEBACK}
MOST_RANKS = 100_000  # of a training; the largest known had some ten thousand
_OF_RANKS = {(RunSpec, "rank"), (RunSpec, "world")}
_RUN_ID = re.compile(r"[0-9a-f]{12}\Z")
_BESIDE = 1_000  # characters more, in which a secret may end that is cut
RESULT_CLASSES: dict[str, type[Any]] = {kind.__name__: kind for kind in RESULT_KINDS}
OBSERVATION_CLASSES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Observation)}


class _Bounded(Decoder):
    """Of specs and machines: numbers are finite, and fit into a column."""

    def plain(self, hint: type[Any], kind: type[Any], name: str) -> Check:
        """Within bounds."""
        check = super().plain(hint, kind, name)

        def bounded(value: object) -> object:
            found = check(value)
            most = MOST_RANKS if (kind, name) in _OF_RANKS else MOST
            if (isinstance(found, float) and not math.isfinite(found)) or (
                isinstance(found, int) and not -most <= found <= most
            ):
                raise Refusal("value", "is out of bounds")
            return found

        return bounded


class _Floats(Decoder):
    """Of results: an int that stands for a float becomes one."""

    def plain(self, hint: type[Any], kind: type[Any], name: str) -> Check:
        """As a float."""
        check = super().plain(hint, kind, name)
        return (lambda value: float(check(value))) if hint is float else check


_SPECS, _RESULTS, _OBSERVATIONS = _Bounded(), _Floats(), Decoder()


def to_json(record: RunSpec | Machine) -> str:
    """Compact JSON; keys in the order of the fields."""
    if isinstance(record, RunSpec):
        record = replace(record, args=masked(record.args))
    return _dumped(dataclasses.asdict(record))


@functools.lru_cache(KEPT)  # a page that follows a run reads the rows of all runs every second
def spec_from_json(text: str) -> RunSpec:
    """Raises StoreError for text that is no RunSpec."""
    spec = _read(_SPECS, RunSpec, text, "The store holds a damaged run")
    return replace(spec, args=masked(spec.args))  # an import may hold what its script was given


def machine_from_json(text: str | None) -> Machine | None:
    """None for a run that has not started."""
    return None if text is None else _machine(text)


@functools.lru_cache(KEPT)
def _machine(text: str) -> Machine:
    return _read(_SPECS, Machine, text, "The store holds a damaged run")


def encode_result(record: Result) -> tuple[str, str]:
    """(kind, JSON of the fields)."""
    return type(record).__name__, _dumped(dataclasses.asdict(record))


def decode_result(kind: str, text: str) -> Result:
    """Inverse of :func:`encode_result`. Raises StoreError for what is no such record."""
    known = _known(RESULT_CLASSES, kind, "result")
    record: Result = _read(_RESULTS, known, text, "A stored result is damaged")
    return record


# Fields with names that nothing masks: a child reads in ``control`` which modules to change, and
# ``class_token`` is no secret.
_OF_NAMES = {
    "consumers", "control", "error_module", "eval_module", "function", "maker", "module",
    "module_type", "modules", "name", "names", "node", "op", "ops", "producers",
}  # fmt: skip
_OF_SOURCE: dict[str, object] = {"code": "", "lines": ()}  # fields with text of the script
_RECORDED: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(_OF_NAMES, str),
    # Paths and names of lines, "train.py:41": a run is made again by them.
    **dict.fromkeys(("error_line", "file", "line", "made_at", "workload"), recorded_place),
    "code": masked_forms,
    "lines": known_forms,  # names of lines, or lines that were masked already
}


def encode_observation(observation: Observation, *, imported: bool = False) -> tuple[str, str]:
    """(kind, JSON of the fields). An imported one has a program that was masked where it ran: to
    parse what comes from elsewhere takes as long as its writer likes."""
    parts = dataclasses.asdict(observation)
    if leaves_out("source"):
        parts |= {name: empty for name, empty in _OF_SOURCE.items() if name in parts}
    elif not imported and "code" in parts:
        parts["code"] = recorded_source(parts["code"])
    elif not imported and parts.get("lines"):
        lines = (line.replace("\n", " ") for line in parts["lines"])
        parts["lines"] = recorded_source("\n".join(lines)).split("\n")
    return type(observation).__name__, _dumped(parts)


def decode_observation(kind: str, text: str) -> Observation:
    """Inverse of :func:`encode_observation`. Raises StoreError for what is not an observation."""
    known = _known(OBSERVATION_CLASSES, kind, "observation")
    record: Observation = _read(_OBSERVATIONS, known, text, "A stored observation is damaged")
    return record


def _dumped(parts: dict[str, Any]) -> str:
    return json.dumps(storable_parts(parts), separators=(",", ":"))


def _known(classes: dict[str, type[Any]], kind: object, what: str) -> type[Any]:
    known = classes.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise StoreError(f"A stored {what} is of the unknown kind {kind!r}; delete this run.")
    return known


def _read(decoder: Decoder, kind: type[T], text: str, what: str) -> T:
    try:
        value = parsed(text)
        return decoder.record(kind, value)
    except Refusal as refusal:
        whole = "it is not an object" if refusal.sort == "type" else refusal.why
        how = f"{refusal.place} {refusal.why}" if refusal.place else whole
        raise StoreError(f"{what} ({how}); delete this run.") from refusal
    except ValueError as error:
        raise StoreError(f"{what} ({error}); delete this run.") from error


class Damaged(ValueError):  # noqa: N818  # says what it found
    """A stored value that nothing of ampscope writes: a text is a text, a number is a number within
    bounds. :mod:`.rows` turns it into one sentence."""


def storable(
    text: str, longest: int = LONGEST, recorded: Callable[[str], str] = recorded_text
) -> str:
    """``text`` as UTF-8 can hold it, both ends of it where it is too long; without secrets, which
    ``recorded`` takes out as this sort of text needs it.

    Half characters, which a name may have in Python and not in UTF-8, are spelled: ``\\udcff``.
    """
    half = longest // 2 - 25
    if len(text) <= longest + 2 * _BESIDE:
        begin = end = text = _spelled(recorded(text))
    else:  # what is masked is bounded
        begin = _spelled(recorded(text[: half + _BESIDE]))
        end = _spelled(recorded(text[-half - _BESIDE :]))
    if len(text) <= longest:
        return text
    left_out = len(text) - longest
    return f"{begin[:half]} […{left_out:,} characters left out…] {end[-half:]}"


def _spelled(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def storable_parts(value: Any) -> Any:
    """``value``, made of JSON's types, with every text in it storable."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {
            (storable(key, recorded=str) if isinstance(key, str) else key): (
                _storable(part, _RECORDED[key]) if key in _RECORDED else storable_parts(part)
            )
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [storable_parts(part) for part in value]
    return value


def _storable(value: Any, recorded: Callable[[str], str]) -> Any:
    """Of a field that holds no texts for a person, but what :data:`_RECORDED` has."""
    if isinstance(value, str):
        return storable(value, recorded=recorded)
    is_texts = isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
    return [_storable(part, recorded) for part in value] if is_texts else storable_parts(value)


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
    """A value of any column on its way in: a name that is no valid UTF-8 (a file called
    ``caf\\xff.py``) is spelled with backslashes, a text is cut to a length that a page can show.
    SQLite stores a REAL NaN as NULL, so NaN is a text."""
    if value is None or type(value) is int:  # most are
        return value
    if isinstance(value, float):
        return "nan" if value != value else value  # NaN alone differs from itself
    if not isinstance(value, str) or name in _JSON:
        return value
    recorded: Callable[[str], str] = str if name in _COLUMNS_OF_NAMES else recorded_text
    if name == "path":  # of a capsule
        recorded = recorded_place
    if name == "traceback":
        recorded = recorded_traceback
    return storable(value, _LONG.get(name, LONGEST), recorded)


def imported_traceback(text: str) -> str:
    """A traceback of elsewhere on its way in; it is not parsed."""
    return storable(text, LONGEST_TRACEBACK, partial(recorded_traceback, parsed=False))


def decoded(raw: bytes) -> str:
    """A text of SQLite's, whatever bytes another program has put there."""
    return raw.decode("utf-8", "backslashreplace")


def text(value: object, longest: int = LONGEST) -> str:
    """A text out of a column, as it was masked when it was written."""
    if type(value) is not str:
        raise Damaged(f"{_shown(value)} stands where a text belongs")
    return value if len(value) <= longest and value.isascii() else storable(value, longest, str)


def is_run_id(value: object) -> bool:
    """12 hexadecimal digits, as in names of files and in addresses."""
    return type(value) is str and _RUN_ID.match(value) is not None


def whole(value: object, low: int = 0, high: int = MOST) -> int:
    """A whole number out of a column."""
    if type(value) is not int:
        raise Damaged(f"{_shown(value)} stands where a whole number belongs")
    if not low <= value <= high:
        raise Damaged(f"{value} is out of bounds")
    return value


def whole_or_none(value: object, low: int = 0, high: int = MOST) -> int | None:
    """A whole number out of a column, or None where it was not recorded."""
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
