"""A bench as a table for the terminal, at most 80 columns wide."""

from __future__ import annotations

from datetime import datetime

from rich import box
from rich.markup import escape
from rich.table import Table

from ampscope.hardware.bench_view import BenchView, bytes_words, rate_words
from ampscope.hardware.ceilings import LABELS, Ceiling
from ampscope.records import Rate, RunInfo

MISSING = "–"


def bench_table(run: RunInfo, view: BenchView) -> Table:
    """One line a dtype, and one for copies."""
    table = Table(
        title=escape(_title(run)),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column("product", no_wrap=True)
    for name in ("reached", "quartiles", "size", "vendor", "share"):
        table.add_column(name, justify="right", no_wrap=name != "size")
    for found in view.ceilings:
        table.add_row(*_cells(found))
    copy, vendor = view.copy, view.vendor
    if copy is not None:
        figure = bytes_words(vendor.bytes_s) if vendor else "unknown"
        size = f"{copy.moved_bytes // 2**21} MiB"
        table.add_row(
            "copy",
            bytes_words(copy.bytes_s),
            quartiles(copy),
            size,
            figure,
            _share(view.copy_share),
        )
    return table


def quartiles(rate: Rate | None) -> str:
    """Distance of the quartiles of the times over their median."""
    return f"{rate.timing.spread:.0%}" if rate and rate.timing else MISSING


def _cells(found: Ceiling) -> tuple[str, ...]:
    label = LABELS[found.dtype] + (" (!)" if found.reason else "")
    if found.best is None:
        return label, "not measured", MISSING, MISSING, MISSING, MISSING
    vendor = rate_words(found.vendor_flops_s) if found.vendor_flops_s else "unknown"
    return (
        label,
        rate_words(found.flops_s),
        quartiles(found.best),
        str(found.best.shape[0]),
        vendor,
        _share(found.share),
    )


def _share(share: float | None) -> str:
    return MISSING if share is None else f"{share:.0%}"


def _title(run: RunInfo) -> str:
    machine = run.machine
    when = datetime.fromtimestamp(run.started or run.created).strftime("%Y-%m-%d %H:%M")
    return f"{machine.device_name}, torch {machine.torch}, {when}" if machine else when
