"""A bench as tables: what is shown, and every rate for the download."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd

from ampscope.hardware.bench_view import BenchView, bytes_words, rate_words
from ampscope.hardware.ceilings import LABELS
from ampscope.records import Rate
from app.text import percent

UNKNOWN = "unknown"


def shown(view: BenchView) -> pd.DataFrame:
    """One row a dtype, and one for copies; the vendor's source is a sentence below it."""
    rows = [
        {
            "": LABELS[found.dtype],
            "reached": rate_words(found.flops_s),
            **_made(found.best),
            "size": f"{found.best.shape[0]:,}" if found.best else "",
            "vendor's figure": _figure(found.vendor_flops_s),
            "share of it": "" if found.share is None else percent(found.share),
            "note": found.reason or found.note,
        }
        for found in view.ceilings
    ]
    copy, vendor = view.copy, view.vendor
    if copy is not None:
        rows.append(
            {
                "": "copy",
                "reached": bytes_words(copy.bytes_s),
                **_made(copy),
                "size": f"{copy.moved_bytes // 2**21:,} MiB",
                "vendor's figure": bytes_words(vendor.bytes_s) if vendor else UNKNOWN,
                "share of it": "" if view.copy_share is None else percent(view.copy_share),
                "note": "Read and written bytes together.",
            }
        )
    return pd.DataFrame(rows)


def every(rates: Sequence[Rate]) -> pd.DataFrame:
    """One row a rate, in plain numbers."""
    return pd.DataFrame(
        {
            "series": r.series,
            "op": r.op,
            "dtype": r.dtype,
            "layout": r.layout,
            "shape": " x ".join(map(str, r.shape)),
            "flops_per_s": r.flops_s,
            "bytes_per_s": r.bytes_s,
            "median_s": r.timing.median_s if r.timing else None,
            "first_quartile_s": r.timing.low_s if r.timing else None,
            "third_quartile_s": r.timing.high_s if r.timing else None,
            "repeats": r.timing.repeats if r.timing else 0,
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(r.measured_at)),
            "note": r.note,
        }
        for r in rates
    )


def _figure(flops_s: float | None) -> str:
    return UNKNOWN if flops_s is None else rate_words(flops_s)


def _made(rate: Rate | None) -> dict[str, str]:
    if rate is None or rate.timing is None:
        return {"quartiles apart": "", "times": "", "measured": ""}
    return {
        "quartiles apart": percent(rate.timing.spread),
        "times": str(rate.timing.repeats),
        "measured": time.strftime("%Y-%m-%d %H:%M", time.localtime(rate.measured_at)),
    }
