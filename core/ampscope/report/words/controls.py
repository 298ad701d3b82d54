"""Controls, interventions and measured values as a person says them.

A control is a word that is stored with a run: ``fp32_modules:encoder.0``. No Markdown is made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ampscope.report.words.numbers import number, power_of_two

_CONTROLS: dict[str, str] = {
    "as_is": "as it is",
    "compiled": "with torch.compile on",
    "fp32": "in fp32",
    "bf16": "in bf16",
    "add_scaler": "with a GradScaler added",
    "unscale_first": "with unscale_ before the clip",
    "fp32_params": "with its parameters in fp32",
    "fp32_state": "with the optimizer's state in fp32",
    "separate_scalers": "with a scaler for each loss",
}
_VALUED: dict[str, Callable[[str], str]] = {
    "scale": lambda value: f"at a loss scale frozen at {_power(value)}",
    "init_scale": lambda value: f"with an initial loss scale of {_power(value)}",
    "growth_interval": lambda value: f"with a growth interval of {value}",
    "lr": lambda value: f"at {value} times its learning rate",
    "eps": lambda value: f"with an epsilon of {value}",
    "fp32_modules": lambda value: f"with {value.replace(',', ', ')} in fp32",
    "op_lists": lambda value: f"with {value.replace('=', ' in ').replace(',', ', ')}",
    "fp32_lines": lambda value: f"with line {value.replace(',', ', ')} in fp32",
}


def control(word: str) -> str:
    """``with encoder.0 in fp32`` for ``fp32_modules:encoder.0``; fits behind "run"."""
    parts = [_one_control(part) for part in word.split(";") if part]
    return " and ".join(parts) or _CONTROLS["as_is"]


def value(measured: float | str | None) -> str:
    """A measurement's value as a person reads it."""
    if measured is None:
        return "none"
    if isinstance(measured, str):
        return measured
    if not math.isfinite(measured):
        return number(measured)
    return f"{measured:,.6g}" if abs(measured) < 1e15 else f"{measured:.4g}"


def _one_control(word: str) -> str:
    name, _, text = word.partition(":")
    if name in _CONTROLS:
        return _CONTROLS[name]
    return _VALUED[name](text) if name in _VALUED else f"under {word}"


def _power(text: str) -> str:
    try:
        return power_of_two(float(text))
    except ValueError:
        return text
