"""A run in MLflow's own folder format, written by MLflow; nothing is sent anywhere.

MLflow draws no histograms: they are an artifact, ``histograms.jsonl``, one object per line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from ampscope.errors import BadInput
from ampscope.ext.trackers.steps import PROJECT, Axis, ExportSummary, exported_steps, require
from ampscope.records import RunInfo, State
from ampscope.store.reader import Reader

# mlflow/utils/validation.py
BATCH = 1000
VALUE = 6000
KEY = 250
ENDS = {
    State.QUEUED: "SCHEDULED",
    State.RUNNING: "RUNNING",
    State.FINISHED: "FINISHED",
    State.FAILED: "FAILED",
}


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
            params=[Param(name, str(value)[:VALUE]) for name, value in config],
            tags=[RunTag("ampscope.run", info.id)],
            synchronous=True,
        )
        with TemporaryDirectory() as aside:
            path = Path(aside) / "histograms.jsonl"
            with path.open("w", encoding="utf-8") as lines:
                for step in exported_steps(reader, info, axis):
                    at = round(step.time * 1000)
                    metrics = [
                        Metric(_allowed_name(name, names), value, at, step.step)
                        for name, value in step.scalars.items()
                    ]
                    for first in range(0, len(metrics), BATCH):
                        batch = metrics[first : first + BATCH]
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
        client.set_terminated(run, ENDS.get(info.state, "KILLED"), ended)
    except MlflowException as error:
        raise BadInput(f"MLflow cannot write {folder}: {error.message}") from error
    return summary


def _allowed_name(name: str, names: dict[str, str]) -> str:
    """``name`` in the characters that MLflow allows; one that another name has become already gets
    a number. ``names`` holds what was given out."""
    if name not in names:
        plain = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[-KEY:]
        taken, other, number = set(names.values()), plain, 2
        while other in taken:
            other, number = f"{plain[: KEY - 8]} {number}", number + 1
        names[name] = other
    return names[name]
