"""RunSpec and Machine as JSON and back, refusing what does not fit the dataclass."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from ampscope.errors import StoreError
from ampscope.records import Cadence, Machine, RunSpec, ScalerSpec

T = TypeVar("T")
NESTED: dict[str, type] = {"scaler": ScalerSpec, "cadence": Cadence}


def to_json(record: RunSpec | Machine) -> str:
    """Compact JSON; keys in the order of the fields."""
    return json.dumps(dataclasses.asdict(record), separators=(",", ":"))


def spec_from_json(text: str) -> RunSpec:
    """Raises StoreError for text that is no RunSpec."""
    return _build(RunSpec, _parsed(text))


def machine_from_json(text: str | None) -> Machine | None:
    """None for a run that has not started."""
    return None if text is None else _build(Machine, _parsed(text))


def _parsed(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise StoreError(f"A stored run is damaged: {error}") from error
    if not isinstance(data, dict):
        raise StoreError("A stored run is damaged: its spec is not an object")
    return data


def _build(kind: type[T], data: dict[str, Any]) -> T:
    """Unknown keys come from a newer minor version and are left out; missing ones take defaults."""
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    values = {k: v for k, v in data.items() if k in known}
    for name, nested in NESTED.items():
        if isinstance(values.get(name), dict):
            values[name] = _build(nested, values[name])
    if isinstance(values.get("args"), list):
        values["args"] = tuple(values["args"])
    try:
        return kind(**values)
    except TypeError as error:
        raise StoreError(f"A stored run is damaged: {error}") from error
