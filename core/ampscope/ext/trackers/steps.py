"""A run step by step, as names with numbers and names with histograms, for any writer of them::

    step/loss step/loss_scale step/skipped step/learning_rate step/grad_norm step/moved_share …
    lost_share/<role>            zero in half and not in the fp32 shadow, share of all elements
    fp16_lost_share/<role>       what fp16 would round to zero at the scale of that step, share of
                                 the non-zero elements; says nothing about values that are fp16
                                 already, because what they lost is zero in them
    zeros/<role>/<module>        elements that are zero
    nan/<role>/<module>, inf/<role>/<module>
    <role>/<module>              histogram of magnitudes, unscaled

Histograms are read one at a time; a step's numbers are small and read together.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ampscope.analysis.distribution import LOST, NONFINITE, ZERO, merged
from ampscope.errors import BadInput
from ampscope.numerics.formats import FP16
from ampscope.numerics.histogram import (
    ABOVE,
    EXPONENTS,
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    Raw,
    zone_matrix,
)
from ampscope.records import Frame, Role, RunInfo, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.series import shadow_columns

ROOT_NAME = "(model)"  # the root module's path is empty
PROJECT = "ampscope"
Axis = Literal["magnitude", "log2"]


@dataclass(slots=True)
class ExportedStep:
    """Everything of one step. ``time`` is when the step ended, in seconds since 1970, as far as
    the recorded step times show."""

    step: int
    time: float
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, UnscaledHistogram] = field(default_factory=dict)


def exported_steps(reader: Reader, info: RunInfo, axis: Axis) -> Iterator[ExportedStep]:
    """All recorded steps of a run, in order."""
    paths = {module.index: module.path or ROOT_NAME for module in reader.modules(info.id)}
    records = iter(reader.steps(info.id))
    frames = (reader.frames(info.id, role) for role in Role)
    parts: Iterator[StepRecord | Frame] = heapq.merge(records, *frames, key=lambda p: p.step)
    lost = _lost_shares(reader, info.id)
    time = info.started if info.started is not None else info.created
    for number, group in groupby(parts, key=lambda part: part.step):
        out = ExportedStep(number, time)
        for part in group:
            if isinstance(part, Frame):
                _add_frame(out, part, paths, axis)
            else:
                time += (part.step_time_s or 0.0) + (part.overhead_s or 0.0)
                out.scalars |= _step_scalars(part)
        out.time = time
        out.scalars |= lost.get(number, {})
        yield out


def _step_scalars(record: StepRecord) -> dict[str, float]:
    values = {
        "loss": record.loss,
        "loss_scale": record.scale,
        "skipped": float(record.skipped),
        "learning_rate": record.lr,
        "grad_norm": record.grad_norm,
        "unclipped_norm": record.unclipped_norm,
        "moved_share": record.moved_share,
        "time_s": record.step_time_s,
        "overhead_s": record.overhead_s,
        "peak_bytes": record.peak_bytes,
    }
    return {f"step/{name}": float(v) for name, v in values.items() if v is not None}


def _add_frame(out: ExportedStep, frame: Frame, paths: dict[int, str], axis: Axis) -> None:
    frame, role = merged(frame), frame.role
    zones = zone_matrix(frame.rows, FP16).sum(axis=0)
    if nonzero := int(zones.sum() - zones[ZERO] - zones[NONFINITE]):
        out.scalars[f"fp16_lost_share/{role}"] = int(zones[LOST]) / nonzero
    for module, row in zip(frame.modules, frame.rows, strict=True):
        name = f"{role}/{paths.get(module, module)}"
        found = unscaled(row, frame.scale, axis)
        out.histograms[name] = found
        out.scalars |= {
            f"zeros/{name}": float(found.zeros),
            f"nan/{name}": float(found.nan),
            f"inf/{name}": float(found.inf),
        }


def _lost_shares(reader: Reader, run_id: str) -> dict[int, dict[str, float]]:
    """Step -> share of the elements that half precision lost, by role, and of those below the
    format's range; from the fp32 shadow."""
    out: dict[int, dict[str, float]] = {}
    for role in Role:
        columns = shadow_columns(reader, run_id, role)
        steps, place = np.unique(columns[:, 0], return_inverse=True)
        sums = np.zeros((len(steps), 3), np.int64)
        np.add.at(sums, place, columns[:, [2, 3, 6]])  # total, lost, below range
        for step, (total, lost, below) in zip(steps.tolist(), sums.tolist(), strict=True):
            if total:
                shares = out.setdefault(step, {})
                shares[f"lost_share/{role}"] = lost / total
                shares[f"below_range_share/{role}"] = below / total
    return out


@dataclass(frozen=True, slots=True)
class UnscaledHistogram:
    """``counts[i]`` finite non-zero elements have a magnitude in [edges[i], edges[i + 1]), or, on
    the log2 axis, the logarithm of one. Both are empty when there is no such element, and when
    ``scale`` is no number that one can divide by (``is_unusable``)."""

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    finite: int  # finite non-zero elements
    zeros: int
    nan: int
    inf: int

    @property
    def is_unusable(self) -> bool:
        """Finite elements were recorded, and the loss scale in them is unknown."""
        return self.finite > 0 and self.counts.size == 0


def unscaled(row: Raw, scale: float, axis: Axis = "magnitude") -> UnscaledHistogram:
    """``row`` [RAW_LEN], recorded multiplied by ``scale``, from its first to its last occupied
    power of two.

    A row counts magnitudes by powers of two, and gradients are recorded as they flowed: multiplied
    by the loss scale. Dividing the *edges* by the scale gives the histogram of the true gradients,
    with not one count changed, also for a scale that is no power of two::

        recorded at scale 3, 5 values in [2^-4, 2^-3)   ->   5 values in [2^-4 / 3, 2^-3 / 3)

    Zeros, NaN and infinities have no place on such an axis; they are counted beside it.
    """
    finite = row[: ABOVE + 1]
    occupied = np.flatnonzero(finite)
    if occupied.size == 0 or not (math.isfinite(scale) and scale > 0):
        edges, counts = np.empty(0), np.empty(0, np.int64)
    else:
        first, end = int(occupied[0]), int(occupied[-1]) + 1
        edges, counts = _edges(scale, axis)[first : end + 1], finite[first:end]
    return UnscaledHistogram(
        edges=edges,
        counts=counts,
        finite=int(finite.sum()),
        zeros=int(row[POS_ZERO] + row[NEG_ZERO]),
        nan=int(row[NAN]),
        inf=int(row[POS_INF] + row[NEG_INF]),
    )


def _edges(scale: float, axis: Axis) -> NDArray[np.float64]:
    """Left edge of every bin, and the right edge of the last: ABOVE + 2 numbers."""
    exponents = np.append(EXPONENTS, EXPONENTS[-1] + 1).astype(np.float64)
    if axis == "log2":
        return np.asarray(exponents - math.log2(scale), np.float64)
    with np.errstate(over="ignore"):
        edges = np.ldexp(1.0, exponents.astype(np.int64)) / scale
    # The two open-ended bins (fp64 only) reach to zero and to the largest number.
    edges[0], edges[-1] = 0.0, sys.float_info.max
    return np.asarray(np.minimum(edges, sys.float_info.max), np.float64)


@dataclass(slots=True)
class ExportSummary:
    """What an export wrote under ``folder``, for the one sentence that is printed about it."""

    folder: Path
    steps: int = 0
    histograms: int = 0
    unusable: int = 0  # histograms left out: their loss scale is no positive finite number

    def count(self, step: ExportedStep) -> None:
        """Take in one step."""
        self.steps += 1
        self.histograms += sum(1 for h in step.histograms.values() if h.counts.size)
        self.unusable += sum(1 for h in step.histograms.values() if h.is_unusable)

    def sentence(self) -> str:
        """How much was written, and what could not be."""
        text = f"{self.steps:,} steps, {self.histograms:,} histograms -> {self.folder}"
        if self.unusable:
            text += (
                f"\n{self.unusable:,} histograms were left out: the loss scale recorded with them "
                "is no positive finite number, so they cannot be unscaled."
            )
        return text


def require(package: str, extra: str) -> None:
    """Raises BadInput, with what to install, when ``package`` is not there."""
    if find_spec(package) is None:
        raise BadInput(f'{package} is not installed: pip install "ampscope[{extra}]"')
