"""Bounds of fields that their types do not say: what the readers of the store rely on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ampscope.records import MEASUREMENT_KINDS

FRAMEWORKS = ("torch", "keras", "paddle")
MOST = 2**63 - 1  # what a column of SQLite holds
MOST_STEPS = 10**12  # a step a millisecond for 30 years
MOST_MODULES = 10**6
MOST_COUNT = 2**50  # elements of one bin: sums over thousands of rows stay within 64 bits
LAST_TIME = 253_402_300_799.0  # the year 9999, where the calendar of Python ends
MOST_POINTS = 20_000  # of one curve, which is drawn in about 1,000 pixels
MOST_HISTOGRAMS = 20_000  # of one frame: modules times dtypes; unpacked they take 45 MB
LONGEST, LONGEST_TRACEBACK = 100_000, 4_000_000  # characters


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
_SIGNED = (-MOST - 1, MOST)
_WHOLES = {
    "Outcome": {"exit_code": _SIGNED, "eval_taint": (-1, MOST)},
    "Event": {"step": (-1, MOST_STEPS)},
    "RunSpec": {"seed": _SIGNED, "steps": (0, MOST_STEPS), "seeds": (0, 10**6)},
    "ScalerSpec": {"growth_interval": (1, MOST_STEPS)},
    "Timing": {"repeats": (1, MOST_STEPS)},
    "EnergyUse": {"steps": (1, MOST_STEPS), "samples": (0, MOST_COUNT)},
    "Histogram": {"row": (0, MOST_COUNT)},
    "ModuleRecord": {"index": (0, MOST_MODULES), "parameter_count": (0, MOST_COUNT)},
}
_STEPS = {"step", "last_step", "attempt", "last_attempt", "steps_done", "attempts"}
_COUNTS = {
    "total", "lost", "below_range", "subnormal", "zero_before", "nan", "pos_inf", "neg_inf", "inf",
    "zeros", "nonfinite", "grad_total", "grad_zero", "grad_nonfinite", "weight_nonfinite", "zero",
    "count", "state_nonfinite", "samples", "calls", "backwards", "rank", "world",
}  # fmt: skip
_WORDS = {
    ("RunSpec", "kind"): ("probe", "script", "watch", *MEASUREMENT_KINDS),
    ("OpRecord", "phase"): ("forward", "backward", "step"),
    ("RunSpec", "framework"): FRAMEWORKS,
    ("Machine", "framework"): FRAMEWORKS,
    ("Outcome", "framework"): FRAMEWORKS,
    ("Rate", "dtype"): ("fp64", "fp32", "tf32", "bf16", "fp16", "int8", "e4m3"),
    ("Rate", "layout"): ("", "NCHW", "channels_last"),
}


def real(kind: type[Any], name: str) -> Real:
    """Bounds of a number with a fraction."""
    if name in _TIMES:
        return _TIME
    default = _PLAIN if kind.__name__ in _ALL_PLAIN else _ANY
    return _REALS.get(kind.__name__, {}).get(name, default)


def whole(kind: type[Any], name: str) -> tuple[int, int]:
    """Bounds of a whole number, both included."""
    found = _WHOLES.get(kind.__name__, {}).get(name)
    if found is not None:
        return found
    if name in _STEPS:
        return (0, MOST_STEPS)
    return (0, MOST_COUNT if name in _COUNTS else MOST)


def words(kind: type[Any], name: str) -> tuple[str, ...] | None:
    """The only texts that a field may hold; None where it may hold any."""
    return _WORDS.get((kind.__name__, name))


def longest(kind: type[Any], name: str) -> int:
    """Characters of a text."""
    return LONGEST_TRACEBACK if name == "traceback" else LONGEST
