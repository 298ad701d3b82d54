"""Results of measurements as tables, one a type: for every type of :mod:`ampscope.records.results`,
so that no result of a lesson can stay out of its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ampscope.compare.figures import quartiles, seconds, size
from ampscope.hardware.bench_view import rate_words
from ampscope.records import EnergyUse, MemorySplit, Rate, Result, StepTimes, Timing
from ampscope.report.document import Table
from ampscope.report.words.numbers import number, percent

NOT_SHOWN = ("measured_at", "is_base")  # when, and of a comparison's own order
Rows: TypeAlias = Sequence[Result]


def table(results: Rows) -> Table:
    """Of results of one type."""
    special = _SPECIAL.get(type(results[0]))
    return special(results) if special is not None else _by_fields(results)


def rates(results: Rows) -> Table:
    """What ops reached."""
    found = [r for r in results if isinstance(r, Rate)]
    rows = tuple(
        (
            r.op,
            r.dtype,
            "×".join(map(str, r.shape)),
            _reached(r),
            "" if r.timing is None else seconds(r.timing.median_s),
            "" if r.timing is None else quartiles(r.timing).partition(" (")[0],
            r.note,
        )
        for r in found
    )
    columns = ("Op", "Dtype", "Shape", "Reached", "Median", "Quartiles", "Note")
    return Table(columns, rows, numeric=(3, 4, 5))


def _times(results: Rows) -> Table:
    found = [r for r in results if isinstance(r, StepTimes)]
    rows = tuple(
        (
            r.precision,
            seconds(r.step.median_s),
            quartiles(r.step),
            *(_median(phase) for phase in (r.forward, r.backward, r.optimizer)),
            f"{r.samples_s:,.0f}" if r.samples else "",
            "" if r.cast_share is None else percent(r.cast_share),
        )
        for r in found
    )
    columns = (
        "Precision", "A step", "Quartiles", "Forward", "Backward", "Optimizer",
        "Samples a second", "Casts, of the time in ops",
    )  # fmt: skip
    return Table(columns, rows, numeric=tuple(range(1, len(columns))))


def _memory(results: Rows) -> Table:
    found = [r for r in results if isinstance(r, MemorySplit)]
    rows = tuple(
        (
            r.precision,
            f"{r.samples:,}",
            *(size(part) for part in (r.peak, r.weights, r.gradients, r.optimizer_state)),
            *(size(part) for part in (r.activations, r.cast_copies, r.temporaries, r.inputs)),
            "not read" if r.device_peak is None else size(r.device_peak),
        )
        for r in found
    )
    columns = (
        "Precision", "Samples", "At the peak", "Weights", "Gradients", "Optimizer state",
        "Activations", "Cast copies", "Temporaries", "Batch", "By the allocator",
    )  # fmt: skip
    return Table(columns, rows, numeric=tuple(range(1, len(columns))))


def _energy(results: Rows) -> Table:
    found = [r for r in results if isinstance(r, EnergyUse)]
    rows = tuple(
        (r.precision, f"{r.joules:.4g} J", f"{r.steps:,}", f"{r.joules / r.steps:.3g} J", r.source)
        for r in found
    )
    columns = ("Precision", "Energy", "Steps", "A step", "Read from")
    return Table(columns, rows, numeric=(1, 2, 3))


def _by_fields(results: Rows) -> Table:
    fields = [f for f in dataclasses.fields(results[0]) if f.name not in NOT_SHOWN]
    rows = tuple(tuple(_cell(getattr(r, f.name)) for f in fields) for r in results)
    numeric = tuple(n for n, f in enumerate(fields) if f.type in ("int", "float"))
    return Table(tuple(f.name.replace("_", " ") for f in fields), rows, numeric)


def _cell(value: object) -> str:
    if isinstance(value, Timing):
        return f"{seconds(value.median_s)}, {quartiles(value)}"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def _median(timing: Timing | None) -> str:
    return "" if timing is None else seconds(timing.median_s)


def _reached(rate: Rate) -> str:
    if rate.flops_s is not None:
        return rate_words(rate.flops_s)
    return "" if rate.bytes_s is None else f"{rate.bytes_s / 1e9:,.1f} GB/s"


_SPECIAL: dict[type[Result], Callable[[Rows], Table]] = {
    Rate: rates,
    StepTimes: _times,
    MemorySplit: _memory,
    EnergyUse: _energy,
}
