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

import dataclasses
import heapq
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
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
from ampscope.records import Frame, Role, RunInfo, State, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.series import shadow_columns

ROOT_NAME = "(model)"  # the root module's path is empty


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


# One histogram row as edges and counts, with the loss scale taken out of it.
#
# A row counts magnitudes by powers of two, and gradients are recorded as they flowed: multiplied
# by the loss scale. Dividing the *edges* by the scale gives the histogram of the true gradients,
# with not one count changed, also for a scale that is no power of two::
#
#     recorded at scale 3, 5 values in [2^-4, 2^-3)   ->   5 values in [2^-4 / 3, 2^-3 / 3)
#
# Zeros, NaN and infinities have no place on such an axis; they are counted beside it, never
# dropped.


Axis = Literal["magnitude", "log2"]


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
    power of two."""
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


# What an export wrote, for the one sentence that the command prints about it.


@dataclass(slots=True)
class ExportSummary:
    """Counts of what was written under ``folder``."""

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


# Packages that ampscope does without: asked for when they are needed, missed in one sentence.


def require(package: str, extra: str) -> None:
    """Raises BadInput, with what to install, when ``package`` is not there."""
    if find_spec(package) is None:
        raise BadInput(f'{package} is not installed: pip install "ampscope[{extra}]"')


# A run as a TensorBoard event file, by tensorboard's own writer, or as a Weights & Biases run.
#
# Histograms are HistogramProto (tensorboard/compat/proto/histogram.proto): ``bucket[i]`` counts
# [bucket_limit[i-1], bucket_limit[i]). Its ``sum`` and ``sum_squares`` cannot be known from counts
# by power of two and are left out; TensorBoard shows neither.


def write_tensorboard(reader: Reader, info: RunInfo, out: Path, axis: Axis) -> ExportSummary:
    """Write ``out/<run id>/events.out.tfevents.…``. Raises BadInput without tensorboard, and when
    that folder holds an export already: TensorBoard would show every point twice."""
    require("tensorboard", "tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = out / info.id
    if any(folder.glob("events.out.tfevents.*")):
        raise BadInput(f"{folder} holds an export already. Remove it, or choose another --out.")
    writer = EventFileWriter(str(folder))
    summary = ExportSummary(folder)
    try:
        for step in exported_steps(reader, info, axis):
            values = [Summary.Value(tag=k, simple_value=v) for k, v in step.scalars.items()]
            for tag, found in step.histograms.items():
                if not found.counts.size:
                    continue
                edges = found.edges.tolist()
                proto = HistogramProto(
                    min=edges[0],
                    max=edges[-1],
                    num=found.finite,
                    bucket_limit=edges,  # the first limit closes an empty bucket below it
                    bucket=[0.0, *found.counts.tolist()],
                )
                values.append(Summary.Value(tag=tag, histo=proto))
            event = Event(wall_time=step.time, step=step.step, summary=Summary(value=values))
            writer.add_event(event)
            summary.count(step)
    finally:
        writer.close()
    return summary


# A run as a Weights & Biases offline folder, written by wandb itself; nothing is sent anywhere.
#
# ``wandb sync FOLDER`` uploads it, when and where its owner wants.


PROJECT = "ampscope"


def write_wandb(reader: Reader, info: RunInfo, out: Path, axis: Axis) -> ExportSummary:
    """Write ``out/wandb/offline-run-…``. Raises BadInput without wandb."""
    require("wandb", "wandb")
    # wandb reports its own errors over the network, offline mode or not.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    out.mkdir(parents=True, exist_ok=True)  # wandb writes elsewhere when the folder is missing
    run = wandb.init(
        project=PROJECT,
        id=info.id,
        name=info.title,
        dir=str(out),
        mode="offline",
        reinit="create_new",  # another run of the same process goes on
        config=dataclasses.asdict(info.spec),
        # This process is not the training: its console, code and machine do not belong there.
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        ),
    )
    summary = ExportSummary(Path(run.dir).parent)
    try:
        for step in exported_steps(reader, info, axis):
            values: dict[str, object] = dict(step.scalars)
            for name, found in step.histograms.items():
                if found.counts.size:
                    pair = (found.counts, found.edges)
                    values[name] = wandb.Histogram(np_histogram=pair)
            run.log(values, step=step.step)
            summary.count(step)
    finally:
        run.finish()
    return summary


# A run in MLflow's own folder format, written by MLflow; nothing is sent anywhere.
#
# MLflow draws no histograms: they are an artifact, ``histograms.jsonl``, one object per line.


def write_mlflow(reader: Reader, info: RunInfo, out: Path, axis: Axis) -> ExportSummary:
    """Write ``out/mlflow``. Raises BadInput without mlflow, when that folder holds an export of the
    run already, and when MLflow refuses to write."""
    require("mlflow", "mlflow")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # 3.7 and newer ask for that
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

    folder = out.absolute() / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    summary = ExportSummary(out / "mlflow")
    try:
        client = MlflowClient(tracking_uri=folder.as_uri())
        found = client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else client.create_experiment(PROJECT)
        if client.search_runs([experiment], f"tags.`ampscope.run` = '{info.id}'"):
            raise BadInput(f"{folder} holds this run already. Remove it, or choose another --out.")
        started = info.started if info.started is not None else info.created
        run = client.create_run(experiment, round(started * 1000), run_name=info.title).info.run_id
        config = dataclasses.asdict(info.spec).items()
        client.log_batch(
            run,
            params=[Param(name, str(value)[:MLFLOW_VALUE]) for name, value in config],
            tags=[RunTag("ampscope.run", info.id)],
            synchronous=True,
        )
        with TemporaryDirectory() as aside:
            path = Path(aside) / "histograms.jsonl"
            with path.open("w", encoding="utf-8") as lines:
                for step in exported_steps(reader, info, axis):
                    at = round(step.time * 1000)
                    metrics = [
                        Metric(_mlflow_name(name, names), value, at, step.step)
                        for name, value in step.scalars.items()
                    ]
                    for first in range(0, len(metrics), MLFLOW_BATCH):
                        batch = metrics[first : first + MLFLOW_BATCH]
                        client.log_batch(run, metrics=batch, synchronous=True)
                    for name, histogram in step.histograms.items():
                        if histogram.counts.size:
                            edges, counts = histogram.edges.tolist(), histogram.counts.tolist()
                            line = {"step": step.step, "name": name} | {
                                "edges": edges,
                                "counts": counts,
                            }
                            lines.write(json.dumps(line) + "\n")
                    summary.count(step)
            client.log_artifact(run, str(path))
        ended = None if info.ended is None else round(info.ended * 1000)
        client.set_terminated(run, MLFLOW_ENDS.get(info.state, "KILLED"), ended)
    except MlflowException as error:
        raise BadInput(f"MLflow cannot write {folder}: {error.message}") from error
    return summary


# mlflow/utils/validation.py
MLFLOW_BATCH = 1000
MLFLOW_VALUE = 6000
MLFLOW_KEY = 250
MLFLOW_ENDS = {
    State.QUEUED: "SCHEDULED",
    State.RUNNING: "RUNNING",
    State.FINISHED: "FINISHED",
    State.FAILED: "FAILED",
}


def _mlflow_name(name: str, names: dict[str, str]) -> str:
    """``name`` in the characters that MLflow allows; one that another name has become already gets
    a number. ``names`` holds what was given out."""
    if name not in names:
        plain = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[-MLFLOW_KEY:]
        taken, other, number = set(names.values()), plain, 2
        while other in taken:
            other, number = f"{plain[: MLFLOW_KEY - 8]} {number}", number + 1
        names[name] = other
    return names[name]
