"""Names and numbers as a person reads them: counts with shares, powers of two, sizes, times; and
what a run was: its file's name, under whose rules it ran, why it holds no histograms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

from ampscope.records import Machine, RunInfo

# Sentences and numbers that the pages and the reports share. Nothing here is markup.


NAME_LENGTH = 48  # what a heat map's axis can hold beside the plot at 800 px


def cut(name: str, length: int = NAME_LENGTH) -> str:
    """Cut in the middle: both the block and the layer stay readable. Show the whole on hover.

    >>> cut("transformer.h.11.attn.c_proj", 17)
    'transfor…n.c_proj'
    """
    if len(name) <= length:
        return name
    tail = (length - 1) // 2
    return f"{name[: length - 1 - tail]}…{name[-tail:]}"


def count(number: int) -> str:
    """``1,204``"""
    return f"{number:,}"


def share(part: int, whole: int) -> str:
    """``1,204 of 4,096, 29.4 %``; says so when there was nothing to take a share of."""
    if whole == 0:
        return "nothing to count"
    return f"{part:,} of {whole:,}, {percent(part / whole)}"


def percent(fraction: float) -> str:
    """``29.4 %``; small shares do not become zero, and large ones do not become all."""
    if not math.isfinite(fraction):
        return "no figure"
    if 0 < fraction < 0.001:
        return "under 0.1 %"
    if 0.999 < fraction < 1:
        return "over 99.9 %"
    return f"{100 * fraction:.1f} %"


def power_of_two(value: float) -> str:
    """``2^16`` for 65536; other values with their exponent to two decimals (``2^15.58``)."""
    if not math.isfinite(value) or value <= 0:
        return number(value)
    exponent = math.log2(value)
    is_exact = float(exponent).is_integer()
    return f"2^{int(exponent)}" if is_exact else f"2^{exponent:.2f}"


def number(value: float | None) -> str:
    """Four significant digits; NaN and infinities by name; a dash-free word for no value."""
    if value is None:
        return "not recorded"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:.4g}"


def size(byte_count: float | None) -> str:
    """MiB, as everywhere in ampscope."""
    return "not recorded" if byte_count is None else f"{byte_count / 2**20:,.1f} MiB"


def duration(seconds: float) -> str:
    """``420 ms``, ``8.4 s``, ``3 min 20 s``, ``2 h 5 min``"""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def ago(moment: float, now: float | None = None) -> str:
    """How long ago ``moment`` (seconds since the epoch) was, in its largest unit."""
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "just now"


def plural(number_: int, noun: str, many: str = "") -> str:
    """``1 step``, ``12 steps``; ``many`` is a plural without a plain s (``3 entries``)."""
    return f"{number_:,} {noun if number_ == 1 else many or noun + 's'}"


# What a run was: its file's name, under whose rules it ran, why it holds no histograms.
#
#     >>> from ampscope.records import Machine
#     >>> rules(Machine("cpu", "", "rehearsal"))
#     "CUDA's rules, rehearsed on a CPU"


@dataclass(frozen=True, slots=True)
class Rules:
    """Whose rules: ``name`` in a line of facts, ``what`` they are made of."""

    name: str
    what: str


_CUDA = Rules("CUDA", "CUDA")
_OWN = Rules("the CPU's own rules", "the CPU's own autocast lists and kernels")
_RULES: Mapping[tuple[str, str], Rules] = MappingProxyType(
    {
        ("torch", "cuda"): _CUDA,
        ("torch", "native"): _OWN,
        ("torch", "rehearsal"): Rules(
            "CUDA's rules, rehearsed on a CPU",
            "CUDA's autocast lists and Tensor Core arithmetic, rehearsed on a CPU",
        ),
        ("keras", "cuda"): _CUDA,
        # Keras has no autocast: a layer computes in the dtype that its policy names.
        ("keras", "native"): Rules(
            "the CPU's own rules", "Keras's dtype policies and the CPU's own kernels"
        ),
        ("paddle", "cuda"): _CUDA,
        ("paddle", "native"): _OWN,
        # Paddle's lists are its own, and half precision is fp32 numbers rounded to it.
        ("paddle", "rehearsal"): Rules(
            "Paddle's rules for CUDA, rehearsed on a CPU",
            "Paddle's autocast lists for CUDA, in fp32 rounded to half, rehearsed on a CPU",
        ),
    }
)


def rules(machine: Machine | None) -> str:
    """Under whose rules a run took place, in few words."""
    return _of(machine).name if machine is not None else "not started"


def rules_in_full(machine: Machine | None) -> str:
    """The same, saying what they are made of."""
    return _of(machine).what if machine is not None else "not started"


def file_name(workload: str) -> str:
    """Of a file its name only: paths are long, and tell more than a reader needs."""
    path, is_file, entry = workload.rpartition(".py")
    return f"{PurePath(path).name}.py{entry}" if is_file else workload


def why_no_histograms(run: RunInfo) -> str:
    """The reason, and how to get some."""
    if run.spec.kind == "script":
        return "They are taken of scripts whose modules run in half precision, as far as they go."
    if run.spec.kind == "watch":
        return "Watch it with every=10 or another number of steps: every=0 takes none."
    return (
        "The probe was started with --histogram-every 0, or it made no step. Start it with "
        "--histogram-every 1 to see its numbers."
    )


def _of(machine: Machine) -> Rules:
    named = Rules(machine.policy, machine.policy)
    return _RULES.get((machine.framework, machine.policy), named)
