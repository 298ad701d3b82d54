"""Numbers as a person reads them: counts with shares, powers of two, sizes, times, rates; and names
that are cut to fit. Texts that the pages, the reports and the command line share; nothing here is
markup.
"""

from __future__ import annotations

import math
import time

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


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def raised(exponent: int) -> str:
    """A power of two as a chart writes it where markup is not possible: ``2¹⁶``."""
    return f"2{str(exponent).translate(_RAISED)}"


def number(value: float | None) -> str:
    """Four significant digits; NaN and infinities by name; a dash-free word for no value."""
    if value is None:
        return "not recorded"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:.4g}"


def value(measured: float | str | None) -> str:
    """A rule's measurement as a person reads it."""
    if measured is None:
        return "none"
    if isinstance(measured, str):
        return measured
    if not math.isfinite(measured):
        return number(measured)
    return f"{measured:,.6g}" if abs(measured) < 1e15 else f"{measured:.4g}"


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


def seconds(value: float) -> str:
    """ "185 ms" """
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def binary_size(count: float) -> str:
    """ "12.3 MiB" """
    if count >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def rate_words(flops_s: float | None) -> str:
    """``312 TFLOP/s``, ``94.5 GFLOP/s``"""
    if flops_s is None:
        return "not measured"
    scale, unit = (1e12, "T") if flops_s >= 1e12 else (1e9, "G")
    return (
        f"{flops_s / scale:.3g} {unit}FLOP/s"
        if flops_s < 1e15
        else f"{flops_s / 1e12:,.0f} TFLOP/s"
    )


def bytes_words(bytes_s: float | None) -> str:
    """``2,650 GB/s``"""
    if bytes_s is None:
        return "not measured"
    return f"{bytes_s / 1e9:,.0f} GB/s" if bytes_s >= 1e11 else f"{bytes_s / 1e9:.3g} GB/s"
