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
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from ampscope.analysis.distribution import LOST, NONFINITE, ZERO, merged
from ampscope.exponents import zone_matrix
from ampscope.exports.unscaled import Axis, Histogram, unscaled
from ampscope.formats import FP16
from ampscope.records import Frame, Role, RunInfo, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.series import shadow_columns

ROOT_NAME = "(model)"  # the root module's path is empty


@dataclass(slots=True)
class ExportedStep:
    """Everything of one step. ``time`` is when the step ended, in seconds since 1970, as far as
    the recorded step times tell."""

    step: int
    time: float
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)


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
    format's range where that was recorded; from the fp32 shadow."""
    out: dict[int, dict[str, float]] = {}
    for role in Role:
        columns = shadow_columns(reader, run_id, role)
        steps, place = np.unique(columns[:, 0], return_inverse=True)
        sums = np.zeros((len(steps), 3), np.int64)
        np.add.at(sums, place, columns[:, [2, 3, 6]])  # total, lost, below range
        is_split = bool((columns[:, 6] >= 0).all())
        for step, (total, lost, below) in zip(steps.tolist(), sums.tolist(), strict=True):
            if total:
                shares = out.setdefault(step, {})
                shares[f"lost_share/{role}"] = lost / total
                if is_split:
                    shares[f"below_range_share/{role}"] = below / total
    return out
