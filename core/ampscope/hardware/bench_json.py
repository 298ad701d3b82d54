"""A bench as ``ampscope hardware --bench --json`` prints it: every figure with its spread, date,
device and versions, and the vendor's figure with its source."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypedDict

from ampscope.hardware.bench_view import BenchView
from ampscope.hardware.ceilings import Ceiling
from ampscope.records import Rate, Result, RunInfo, Timing


class TimingJson(TypedDict):
    """Seconds of one call."""

    median_s: float
    low_s: float
    high_s: float
    spread: float
    repeats: int


class RateJson(TypedDict):
    """One measured rate."""

    series: str
    op: str
    dtype: str
    shape: list[int]
    layout: str
    flops_s: float | None
    bytes_s: float | None
    timing: TimingJson | None
    measured_at: str
    note: str


class CeilingJson(TypedDict):
    """One dtype."""

    dtype: str
    flops_s: float | None
    spread: float | None
    shape: list[int]
    vendor_flops_s: float | None
    vendor_share: float | None
    expected_flops_s: float | None
    is_behind: bool
    reason: str
    note: str


class BenchJson(TypedDict):
    """One bench."""

    run: str
    date: str
    elapsed_s: float | None
    device: str
    device_name: str
    capability: str
    torch: str
    python: str
    platform: str
    is_quick: bool
    message: str
    sentence: str
    warnings: list[str]
    alignment: str
    vendor_source: str | None
    copy_bytes_s: float | None
    copy_vendor_bytes_s: float | None
    copy_vendor_share: float | None
    ceilings: list[CeilingJson]
    rates: list[RateJson]


def bench_json(run: RunInfo, results: Sequence[Result], view: BenchView) -> BenchJson:
    """Everything of one bench."""
    machine = run.machine
    began = run.started or run.created
    return BenchJson(
        run=run.id,
        date=_date(began),
        elapsed_s=run.ended - began if run.ended else None,
        device=machine.device if machine else "",
        device_name=machine.device_name if machine else "",
        capability=machine.capability if machine else "",
        torch=machine.torch if machine else "",
        python=machine.python if machine else "",
        platform=machine.platform if machine else "",
        is_quick="quick" in run.spec.args,
        message=run.message,
        sentence=view.sentence,
        warnings=list(view.warnings),
        alignment=view.alignment_sentence,
        vendor_source=view.vendor.source if view.vendor else None,
        copy_bytes_s=view.copy.bytes_s if view.copy else None,
        copy_vendor_bytes_s=view.vendor.bytes_s if view.vendor else None,
        copy_vendor_share=view.copy_share,
        ceilings=[_ceiling(c) for c in view.ceilings],
        rates=[_rate(r) for r in results if isinstance(r, Rate)],
    )


def _ceiling(found: Ceiling) -> CeilingJson:
    best = found.best
    return CeilingJson(
        dtype=found.dtype,
        flops_s=found.flops_s,
        spread=best.timing.spread if best and best.timing else None,
        shape=list(best.shape) if best else [],
        vendor_flops_s=found.vendor_flops_s,
        vendor_share=found.share,
        expected_flops_s=found.expected_flops_s,
        is_behind=bool(found.reason),
        reason=found.reason,
        note=found.note,
    )


def _rate(rate: Rate) -> RateJson:
    return RateJson(
        series=rate.series,
        op=rate.op,
        dtype=rate.dtype,
        shape=list(rate.shape),
        layout=rate.layout,
        flops_s=rate.flops_s,
        bytes_s=rate.bytes_s,
        timing=_timing(rate.timing) if rate.timing else None,
        measured_at=_date(rate.measured_at),
        note=rate.note,
    )


def _timing(timing: Timing) -> TimingJson:
    return TimingJson(
        median_s=timing.median_s,
        low_s=timing.low_s,
        high_s=timing.high_s,
        spread=timing.spread,
        repeats=timing.repeats,
    )


def _date(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
