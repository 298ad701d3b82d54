"""The figures of a comparison as texts, one row each: the same in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from ampscope.compare.losses import final_loss
from ampscope.compare.views import (
    Measured,
    cost_per_million,
    joules_a_step,
    memory_ratio,
    peak_bytes,
    speedup,
)
from ampscope.records import MemorySplit, StepTimes, Timing

Cell: TypeAlias = Callable[[Measured], str]  # "" where it was not measured


def figures(base: Measured | None, price: float = 0.0) -> tuple[tuple[str, Cell], ...]:
    """(label, text of one precision); ``price`` is the machine's an hour, 0 for none."""
    return (
        ("time a step, median", lambda m: _of(m.times, lambda t: seconds(t.step.median_s))),
        ("quartiles", lambda m: _of(m.times, lambda t: quartiles(t.step))),
        (f"speed against {base.precision if base else 'fp32'}", partial(_speed, base)),
        ("samples a second", lambda m: _of(m.times, _throughput)),
        ("forward / backward / optimizer", lambda m: _of(m.times, _phases)),
        ("casts, of the time in ops", lambda m: _of(m.times, _casts)),
        (_peak_label(base), lambda m: _of(peak_bytes(m), size)),
        ("against the base", partial(_memory, base)),
        ("activations at the peak", lambda m: _of(m.memory, lambda s: size(s.activations))),
        ("cast copies at the peak", lambda m: _of(m.memory, lambda s: size(s.cast_copies))),
        ("weights and optimizer state", lambda m: _of(m.memory, _kept)),
        ("loss, last third", _loss),
        ("steps left out by GradScaler", lambda m: str(m.skips) if m.curves else ""),
        ("energy a step", _energy),
        ("a million samples cost", partial(_cost, price)),
    )


def seconds(value: float) -> str:
    """ "185 ms" """
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def quartiles(timing: Timing) -> str:
    """ "180–191 ms (56 steps)" """
    factor, unit = (1e3, "ms") if timing.high_s < 1 else (1.0, "s")
    low, high = timing.low_s * factor, timing.high_s * factor
    return f"{low:.3g}–{high:.3g} {unit} ({timing.repeats} steps)"


def size(count: float) -> str:
    """ "12.3 MiB" """
    if count >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _of(value: object, text: Callable[..., str]) -> str:
    return "" if value is None else text(value)


def _throughput(times: StepTimes) -> str:
    return f"{times.samples_s:,.0f}" if times.samples else ""


def _phases(times: StepTimes) -> str:
    if not (times.forward and times.backward and times.optimizer):
        return ""
    parts = [times.forward.median_s, times.backward.median_s, times.optimizer.median_s]
    return " / ".join(f"{part / sum(parts):.0%}" for part in parts)


def _casts(times: StepTimes) -> str:
    return "" if times.cast_share is None else f"{times.cast_share:.0%}"


def _kept(memory: MemorySplit) -> str:
    return size(memory.weights + memory.gradients + memory.optimizer_state)


def _speed(base: Measured | None, m: Measured) -> str:
    if base is None or base.times is None or m.times is None:
        return ""
    return f"{speedup(base.times, m.times).value:.2f}×"


def _memory(base: Measured | None, m: Measured) -> str:
    ratio = None if base is None else memory_ratio(base, m)
    return "" if ratio is None else f"{ratio:.0%}"


def _loss(m: Measured) -> str:
    losses = [final_loss(curve) for curve in m.curves]
    return f"{sum(losses) / len(losses):.4g}" if losses else ""


def _energy(m: Measured) -> str:
    joules = joules_a_step(m)
    return "" if joules is None else f"{joules:.3g} J"


def _cost(price: float, m: Measured) -> str:
    cost = cost_per_million(m.times, price) if price and m.times else None
    return "" if cost is None else f"{cost:.4g}"


def _peak_label(base: Measured | None) -> str:
    """Of a script it is the whole process that is measured."""
    return f"peak memory, {base.process.what}" if base and base.process else "peak memory"
