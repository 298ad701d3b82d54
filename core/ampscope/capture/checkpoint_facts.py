"""Does a checkpoint hold the state of a GradScaler? Looked for by its keys, at any depth."""

from __future__ import annotations

from collections.abc import Mapping

_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval"}  # GradScaler.state_dict
MAX_DEPTH = 4


def has_scaler_state(value: object, depth: int = 0) -> bool:
    """True when ``value`` is or contains a GradScaler's state_dict."""
    if not isinstance(value, Mapping) or depth > MAX_DEPTH:
        return False
    if value.keys() >= _KEYS:
        return True
    return any(has_scaler_state(part, depth + 1) for part in value.values())
