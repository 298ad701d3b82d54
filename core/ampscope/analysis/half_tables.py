"""Buffers in half precision: tables that a model computed once and keeps."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.observations import Scan

COARSE_SPREAD = 0.05  # one rounding to bf16 is at most 0.4 % of a value


@dataclass(frozen=True, slots=True)
class CoarseTable:
    """A buffer, and how far it is from the fp32 control's: largest difference over the spread."""

    scan: Scan
    error: float


def coarse_table(run: RunView, fp32: RunView) -> CoarseTable | None:
    """The first buffer that was built in another dtype than fp32 and differs from the control's by
    more than :data:`COARSE_SPREAD`."""
    tables = {s.name: s for s in fp32.scans_of("start", "buffer")}
    for scan in run.scans_of("start", "buffer"):
        reference = tables.get(scan.name)
        if reference is None or scan.dtype == "fp32":
            continue
        error = _distance(scan.sample, reference.sample)
        if error is not None and error > COARSE_SPREAD:
            return CoarseTable(scan, error)
    return None


def owner_of_only_table(run: RunView) -> str:
    """Path of the module that owns the half buffers of the model, when it is a single one; else "".

    A table is mostly built in a constructor, where no module runs that could be named.
    """
    names = {
        scan.name.rpartition(".")[0]
        for scan in run.scans_of("start", "buffer")
        if scan.dtype in ("fp16", "bf16")
    }
    return names.pop() if len(names) == 1 else ""


def _distance(values: tuple[float, ...], reference: tuple[float, ...]) -> float | None:
    """None when the samples cannot be compared: of different lengths, or all values the same."""
    if len(values) != len(reference) or not values:
        return None
    spread = max(reference) - min(reference)
    largest = max(abs(a - b) for a, b in zip(values, reference, strict=True))
    return largest / spread if spread else None
