"""Mutations of exported files: of their bytes, of their text, and of what they say.

    mutate(random.Random(7), good)     # (b'{"schema":2,…', "swap a value's type")

A file's structure is kept as pairs while it is changed, so that a key can stand twice in it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

DEEP = 100_000  # lists in each other
GIANT = 150_000  # characters of a text, more than a field may have
HUGE_NUMBERS = (
    "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 400, "9" * 5_000, "-" + "9" * 30,
    "9223372036854775808", "-9223372036854775809", "1e308", "-1e308", "5e-324", "-0", "-0.0",
    "0.5", "-1", "9223372036854775807", "1e15", "4294967296", "9007199254740993",
)  # fmt: skip
TEXTS = (
    "", "\\ud800", "\\udfff\\ud800", "\\u0000", "\\u202e", "\\u001b[31m", "</script>", "nan",
    "inf", "-inf", "NaN", "0", "true", "null", "a" * 3_000, "-150", "128", "+0", "\\u0660",
)  # fmt: skip
RAW = (*HUGE_NUMBERS, "null", "true", "false", "[]", "{}", "[[]]", '[{"a":1}]', '{"a":{}}')
SET = b'{}[]",:0123456789-eE.nul\\\x00\xff'


class Raw(str):
    """JSON text that is written as it is."""

    __slots__ = ()


def mutate(chance: random.Random, good: bytes) -> tuple[bytes, str]:
    """A changed file, and the sort of change; some files are changed twice."""
    sort = chance.choice(list(_SORTS))
    changed = _SORTS[sort](chance, good)
    if changed and chance.random() < 0.15:
        again = chance.choice(list(_BYTES))
        return _BYTES[again](chance, changed), f"{sort}, {again}"
    return changed, sort


def _flip(chance: random.Random, good: bytes) -> bytes:
    changed = bytearray(good)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _set(chance: random.Random, good: bytes) -> bytes:
    changed = bytearray(good)
    for _ in range(chance.choice((1, 1, 3))):
        changed[chance.randrange(len(changed))] = chance.choice(SET)
    return bytes(changed)


def _truncate(chance: random.Random, good: bytes) -> bytes:
    return good[: chance.randrange(len(good))]


def _cut(chance: random.Random, good: bytes) -> bytes:
    start = chance.randrange(len(good))
    return good[:start] + good[start + chance.choice((1, 3, 40, 800)) :]


def _repeat(chance: random.Random, good: bytes) -> bytes:
    start = chance.randrange(len(good))
    end = start + chance.choice((1, 10, 300))
    return good[:end] + good[start:end] + good[end:]


def _encode(chance: random.Random, good: bytes) -> bytes:
    coding = chance.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-le"))
    return good.decode("utf-8", "replace").encode(coding)


_BYTES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "flip bits": _flip,
    "set bytes": _set,
    "truncate": _truncate,
    "cut bytes out": _cut,
    "repeat bytes": _repeat,
}


def _structural(
    change: Callable[[random.Random, list[Any], int], None], *, of_objects: bool = False
) -> Callable[[random.Random, bytes], bytes]:
    """A change at one place: ``change`` is given what holds the value, as a list of values or of
    pairs, and the place in it."""

    def changed(chance: random.Random, good: bytes) -> bytes:
        tree = json.loads(good, object_pairs_hook=lambda pairs: {"pairs": [*map(list, pairs)]})
        places = [*_places(tree, of_objects)]
        # Half of the changes go to rows of any depth, half to the few places near the top.
        near = [p for p in places if p[2] <= 3] or places
        holder, place, _ = chance.choice(near if chance.random() < 0.4 else places)
        change(chance, holder, place)
        return _written(tree).encode("utf-8", "surrogatepass")

    return changed


def _places(value: Any, of_objects: bool, depth: int = 0) -> Iterator[tuple[list[Any], int, int]]:
    if isinstance(value, dict):
        for place, pair in enumerate(value["pairs"]):
            yield value["pairs"], place, depth
            yield from _places(pair[1], of_objects, depth + 1)
    elif isinstance(value, list):
        for place, part in enumerate(value):
            if not of_objects:
                yield value, place, depth
            yield from _places(part, of_objects, depth + 1)


def _is_pair(holder: list[Any], place: int) -> bool:
    part = holder[place]
    return isinstance(part, list) and len(part) == 2 and isinstance(part[0], str)


def _put(holder: list[Any], place: int, value: Any) -> None:
    if _is_pair(holder, place):
        holder[place][1] = value
    else:
        holder[place] = value


def _value(chance: random.Random, holder: list[Any], place: int) -> None:
    _put(holder, place, Raw(chance.choice(RAW)))


def _number(chance: random.Random, holder: list[Any], place: int) -> None:
    _put(holder, place, Raw(chance.choice(HUGE_NUMBERS)))


def _text(chance: random.Random, holder: list[Any], place: int) -> None:
    _put(holder, place, Raw(f'"{chance.choice(TEXTS)}"'))


def _giant(chance: random.Random, holder: list[Any], place: int) -> None:
    _put(holder, place, Raw('"' + chance.choice(("x", "\\ud83d", "ä")) * GIANT + '"'))


def _nest(chance: random.Random, holder: list[Any], place: int) -> None:
    depth = chance.choice((10, 900, DEEP))
    opened, closed = chance.choice((("[", "]"), ('{"a":', "}")))
    _put(holder, place, Raw(opened * depth + "1" + closed * depth))


def _drop(chance: random.Random, holder: list[Any], place: int) -> None:
    del holder[place]


def _double(chance: random.Random, holder: list[Any], place: int) -> None:
    holder.insert(chance.randrange(len(holder) + 1), holder[place])


def _rename(chance: random.Random, holder: list[Any], place: int) -> None:
    name = chance.choice((*TEXTS, "step", "id", "__class__", "schema"))
    holder[place] = [Raw(f'"{name}"'), holder[place][1]]


def _swap(chance: random.Random, holder: list[Any], place: int) -> None:
    other = chance.randrange(len(holder))
    first, second = holder[place], holder[other]
    if _is_pair(holder, place) and _is_pair(holder, other):
        holder[place], holder[other] = [first[0], second[1]], [second[0], first[1]]
    else:
        holder[place], holder[other] = second, first


def _off_by(chance: random.Random, holder: list[Any], place: int) -> None:
    old = holder[place][1] if _is_pair(holder, place) else holder[place]
    if isinstance(old, int | float) and not isinstance(old, bool):
        _put(holder, place, old + chance.choice((-1, 1, 1000, -(10**6))))
    else:
        _value(chance, holder, place)


_SORTS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    **_BYTES,
    "other encoding": _encode,
    "another value": _structural(_value),
    "another number": _structural(_number),
    "another text": _structural(_text),
    "a giant text": _structural(_giant),
    "nested deep": _structural(_nest),
    "drop": _structural(_drop),
    "double": _structural(_double),
    "rename a key": _structural(_rename, of_objects=True),
    "swap two values": _structural(_swap),
    "change a number": _structural(_off_by),
}


def _written(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_key(k)}:{_written(v)}" for k, v in value["pairs"]) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def _key(name: str) -> str:
    return str(name) if isinstance(name, Raw) else json.dumps(name)
