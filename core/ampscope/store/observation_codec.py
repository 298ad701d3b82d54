"""Observations of a script as JSON rows and back; each kind is one dataclass.

JSON has no NaN and no infinity: Python's own spelling (NaN, Infinity) is used, which
``json.loads`` reads back.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

from ampscope.errors import StoreError
from ampscope.observations import BadOp, Observation, Operand

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Observation)}


def encode(observation: Observation) -> tuple[str, str]:
    """(kind, JSON of the fields)."""
    text = json.dumps(dataclasses.asdict(observation), separators=(",", ":"))
    return type(observation).__name__, text


def decode(kind: str, text: str) -> Observation:
    """Inverse of :func:`encode`. Raises StoreError for what is not an observation."""
    known = KINDS.get(kind)
    if known is None:
        raise StoreError(f"A stored observation is of the unknown kind {kind!r}; delete this run.")
    try:
        fields = {k: _tupled(v) for k, v in json.loads(text).items()}
        if known is BadOp:
            fields["inputs"] = tuple(
                Operand(**{k: _tupled(v) for k, v in part.items()}) for part in fields["inputs"]
            )
        result: Observation = known(**fields)
    except (TypeError, ValueError, KeyError) as error:
        raise StoreError(f"A stored observation is damaged ({error}); delete this run.") from error
    return result


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
