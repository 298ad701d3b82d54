"""RunSpec and Machine as JSON and back, refusing what does not fit the dataclass."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from typing import Any, TypeVar

from ampscope.errors import StoreError
from ampscope.privacy import masked
from ampscope.records import Cadence, Machine, RunSpec, ScalerSpec
from ampscope.store import door

T = TypeVar("T")
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
NESTED: dict[str, type] = {"ScalerSpec": ScalerSpec, "Cadence": Cadence}  # by declared type


def to_json(record: RunSpec | Machine) -> str:
    """Compact JSON; keys in the order of the fields."""
    if isinstance(record, RunSpec):
        record = replace(record, args=masked(record.args))
    return json.dumps(door.storable_parts(dataclasses.asdict(record)), separators=(",", ":"))


def spec_from_json(text: str) -> RunSpec:
    """Raises StoreError for text that is no RunSpec."""
    return _build(RunSpec, _parsed(text))


def machine_from_json(text: str | None) -> Machine | None:
    """None for a run that has not started."""
    return None if text is None else _build(Machine, _parsed(text))


def _parsed(text: str) -> dict[str, Any]:
    try:
        data = door.parsed(text)
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
        isinstance(value, int) and not -door.MOST <= value <= door.MOST
    ):
        raise _damaged(f"{field.name} is out of bounds")


def _damaged(how: str) -> StoreError:
    return StoreError(f"The store holds a damaged run ({how}); delete this run.")
