"""From the bytes of an untrusted file to checked values: JSON within bounds, then plain values,
then records by their type hints, with the bounds that a type cannot say.

A checker takes a value and gives what a field holds, or raises :class:`Refusal`, which names the
place and the reason.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ampscope.errors import BadInput
from ampscope.record_json import NONFINITE, Check, Decoder, Refusal, quoted
from ampscope.records import MEASUREMENT_KINDS
from ampscope.store import db
from ampscope.store.codec import LAST_TIME, MOST, MOST_RANKS

MAX_BYTES = 16 * 2**20
MAX_VALUES = 1_200_000  # by commas, those in texts too; an int in a dict takes about 100 bytes
MAX_KEYS = 1_000  # of one object; a histogram has at most 284
MAX_PARTS = 250_000  # lists and objects: a dict of its own takes 200 bytes and more
_MERGE = (
    "Runs as large as that are handed on as a store: ampscope runs merge, which runs nothing of it "
    "unless you say --trust"
)
MAX_DIGITS = 19  # of a whole number: what 64 bits hold


def read(path: Path) -> object:
    """The file's value. Raises Refusal for what is not JSON, BadInput for what is no file.

    What a file may hold is bounded before anything is made of it, by its size and by the number of
    its commas and brackets: whatever is let in takes less than 300 MB and 20 s of a core
    (docs/decisions/0014-what-an-import-checks.md).
    """
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


def _too_large(size: int) -> str:
    return f"it has {size / 2**20:,.1f} MiB, and {MAX_BYTES // 2**20} are read at most. {_MERGE}"


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


@dataclass(frozen=True, slots=True)
class ForbiddenJson:
    """What JSON allows and an export never holds (a key twice, NaN, numbers beyond 64 bits): it is
    refused by its place, where a checker meets it."""

    sort: str
    why: str


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
        return ForbiddenJson(
            "size", f"{len(pairs):,} keys are more than any object of an export has"
        )
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return ForbiddenJson("duplicate", f"the key {quoted(key)} stands in it twice")
        seen.add(key)
    return found


def _whole(text: str) -> int | ForbiddenJson:
    if len(text) > MAX_DIGITS + 1:
        return ForbiddenJson("number", f"a number of {len(text):,} digits is too large")
    return int(text)


def _float(text: str) -> float | ForbiddenJson:
    value = float(text)
    if value - value != 0:
        return ForbiddenJson("number", f'{quoted(text)} is too large; infinity is written "inf"')
    return value


def _constant(name: str) -> ForbiddenJson:
    return ForbiddenJson("number", f"{name} is not JSON; an export writes it as a text")


def rows(value: object) -> list[object]:
    """A list, whatever is in it."""
    if isinstance(value, list):
        return value
    raise _unlike("a list", value)


def fields(value: object) -> dict[str, object]:
    """An object, whatever is in it."""
    if isinstance(value, dict):
        return value
    raise _unlike("an object", value)


def whole(low: int, high: int) -> Check:
    """A whole number between two bounds, both included."""

    def check(value: object) -> int:
        if type(value) is not int:
            raise _unlike("a whole number", value)
        if not low <= value <= high:
            raise Refusal("value", f"{value:,} is not between {low:,} and {high:,}")
        return value

    return check


def text(longest: int) -> Check:
    """A text that can be stored: no longer than that, and without half a character."""

    def check(value: object) -> str:
        if type(value) is not str:
            raise _unlike("a text", value)
        if len(value) > longest:
            raise Refusal("text", f"a text of {len(value):,} characters; {longest:,} are allowed")
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                bad = quoted(value[error.start])
                raise Refusal("text", f"{bad} is half a character") from None
        return value

    return check


def real(low: float, high: float, *, may_be_nonfinite: bool, above: bool = False) -> Check:
    """A number; NaN and infinities are the texts that an export writes. ``above``: ``low`` itself
    is too low."""

    def check(value: object) -> float:
        if type(value) is str and value in NONFINITE:
            found = NONFINITE[value]
            if may_be_nonfinite and (found >= low or low == -math.inf):  # NaN is within no bound
                return found
            raise Refusal("value", f"{value} cannot stand here")
        if type(value) not in (int, float):
            raise _unlike("a number", value)
        assert isinstance(value, int | float)
        if not low <= value <= high or (above and value == low):
            raise Refusal("value", f"{value:,} is not between {low:,.6g} and {high:,.6g}")
        return float(value)

    return check


def boolean(value: object) -> bool:
    """true or false, and no number."""
    if type(value) is not bool:
        raise _unlike("true or false", value)
    return value


def one_of(words: tuple[str, ...]) -> Check:
    """One of a few texts."""

    def check(value: object) -> str:
        if type(value) is not str:
            raise _unlike("a text", value)
        if value not in words:
            raise Refusal("value", f"{quoted(value)} is none of {', '.join(words)}")
        return value

    return check


def _unlike(wanted: str, value: object) -> Refusal:
    if isinstance(value, ForbiddenJson):
        return Refusal(value.sort, value.why)
    return Refusal("type", f"{wanted} was expected, not {what(value)}")


def what(value: object) -> str:
    """The kind of a JSON value, in words."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text"}
    kinds |= {list: "a list", dict: "an object", type(None): "nothing (null)"}
    return kinds.get(type(value), "something else")


T = TypeVar("T")
MOST_POINTS = 20_000  # of one curve, which is drawn in about 1,000 pixels


class _Checked(Decoder):
    """Trusts nothing: unknown keys are refused, every value has bounds. Fields that have a default
    may be missing, because older versions did not write them."""

    most_values = MOST_POINTS

    def unlike(self, wanted: str, value: object) -> Refusal:
        """Names what was expected, in the words of JSON."""
        return _unlike(wanted, value)

    def unknown(self, kind: type[Any]) -> Refusal:
        """No key is left out."""
        why = f"a {kind.__name__} has no such field; perhaps a newer ampscope wrote the file"
        return Refusal("key", why)

    def plain(self, hint: type[Any], kind: type[Any], name: str) -> Check:
        """With the bounds of the tables below, on which the readers of the store rely."""
        if hint is bool:
            return boolean
        if issubclass(hint, Enum):
            known = {str(member.value): member for member in hint}
            one = one_of(tuple(known))
            return lambda value: known[one(value)]
        if (words := bound_words(kind, name)) is not None:
            return one_of(words)
        if hint is str:
            return text(longest(kind, name))
        if hint is int:
            return whole(*whole_within(kind, name))
        if hint is float:
            within = real_within(kind, name)
            return real(
                within.low, within.high, may_be_nonfinite=within.nonfinite, above=within.above
            )
        raise TypeError(f"{kind.__name__}.{name} has a type that no file can hold")


_DECODER = _Checked()


def record(kind: type[T], value: object) -> T:
    """``value``, an object, as that dataclass."""
    return _DECODER.record(kind, value)


FRAMEWORKS = ("torch", "keras", "paddle")
MOST_STEPS = 10**12  # a step a millisecond for 30 years
MOST_MODULES = 10**6
MOST_COUNT = 2**50  # elements of one bin: sums over thousands of rows stay within 64 bits
MOST_HISTOGRAMS = 20_000  # of one frame: modules times dtypes; unpacked they take 45 MB


@dataclass(frozen=True, slots=True)
class Real:
    """Of a number with a fraction. ``above``: the lower bound itself is too low."""

    low: float = -float("inf")
    high: float = float("inf")
    nonfinite: bool = True
    above: bool = False


_ANY = Real()
_TIME = Real(0.0, LAST_TIME, nonfinite=False)
_POSITIVE = Real(0.0, 1e300, nonfinite=False, above=True)
_PLAIN = Real(-1e300, 1e300, nonfinite=False)
_SCALE = Real(0.0, 1e300)  # one that halves at every step arrives at 0; one may be set to infinity
_SECONDS = Real(0.0, 1e12, nonfinite=False)
_TIMES = {"created", "started", "ended", "heartbeat", "at", "measured_at", "ended_at"}
_REALS = {
    "Timing": {"median_s": _POSITIVE, "low_s": _POSITIVE, "high_s": _POSITIVE},
    "ScalerSpec": dict.fromkeys(("init_scale", "growth_factor", "backoff_factor"), _POSITIVE),
    "RunSpec": {
        "loss_factor": _POSITIVE,
        "grace_s": _PLAIN,
        "time_limit_s": _PLAIN,
    },
    "EnergyUse": {"joules": _PLAIN},
    "StepRecord": {"scale": _SCALE, "step_time_s": _SECONDS, "overhead_s": _SECONDS},
    "HistogramRow": {"scale": _SCALE},
}
_ALL_PLAIN = {"Sample"}  # what was read of a machine is a number or is not there


def real_within(kind: type[Any], name: str) -> Real:
    """Bounds of a number with a fraction."""
    if name in _TIMES:
        return _TIME
    default = _PLAIN if kind.__name__ in _ALL_PLAIN else _ANY
    return _REALS.get(kind.__name__, {}).get(name, default)


_SIGNED = (-MOST - 1, MOST)
_WHOLES = {
    "Outcome": {"exit_code": _SIGNED, "eval_taint": (-1, MOST)},
    "Event": {"step": (-1, MOST_STEPS)},
    "RunSpec": {
        "seed": _SIGNED,
        "steps": (0, MOST_STEPS),
        "skip_to": (0, MOST_STEPS),
        "seeds": (0, 10**6),
        "rank": (0, MOST_RANKS),
        "world": (0, MOST_RANKS),
    },
    "ScalerSpec": {"growth_interval": (1, MOST_STEPS)},
    "Timing": {"repeats": (1, MOST_STEPS)},
    "EnergyUse": {"steps": (1, MOST_STEPS), "samples": (0, MOST_COUNT)},
    "Histogram": {"row": (0, MOST_COUNT)},
    "ModuleRecord": {"index": (0, MOST_MODULES), "parameter_count": (0, MOST_COUNT)},
}
_STEPS = {"step", "last_step", "error_step", "steps", "steps_done"}
_COUNTS = {
    "total", "lost", "below_range", "subnormal", "zero_before", "nan", "pos_inf", "neg_inf", "inf",
    "zeros", "nonfinite", "grad_total", "grad_zero", "grad_nonfinite", "weight_nonfinite", "zero",
    "count", "state_nonfinite", "samples", "calls", "backwards",
}  # fmt: skip


def whole_within(kind: type[Any], name: str) -> tuple[int, int]:
    """Bounds of a whole number, both included."""
    found = _WHOLES.get(kind.__name__, {}).get(name)
    if found is not None:
        return found
    if name in _STEPS:
        return (0, MOST_STEPS)
    return (0, MOST_COUNT if name in _COUNTS else MOST)


_WORDS = {
    ("RunSpec", "kind"): ("probe", "script", "watch", *MEASUREMENT_KINDS),
    ("OpRecord", "phase"): ("forward", "backward", "step"),
    ("RunSpec", "framework"): FRAMEWORKS,
    ("Machine", "framework"): FRAMEWORKS,
    ("Outcome", "framework"): FRAMEWORKS,
    ("Rate", "dtype"): ("fp64", "fp32", "tf32", "bf16", "fp16", "int8", "e4m3"),
    ("Rate", "layout"): ("", "NCHW", "channels_last"),
}


def bound_words(kind: type[Any], name: str) -> tuple[str, ...] | None:
    """The only texts that a field may hold; None where it may hold any."""
    return _WORDS.get((kind.__name__, name))


LONGEST, LONGEST_TRACEBACK = 100_000, 4_000_000  # characters


def longest(kind: type[Any], name: str) -> int:
    """Characters of a text."""
    return LONGEST_TRACEBACK if name == "traceback" else LONGEST
