"""JSON has neither NaN nor infinity: numbers that are not finite become texts, "nan" and "inf"."""

from __future__ import annotations

import math


def finite(value: object) -> object:
    """``value`` with every such number in it replaced, in dicts, lists and tuples at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value
