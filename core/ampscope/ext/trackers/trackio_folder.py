"""A run in Trackio's own folder format, written by Trackio in a process of its own.

Trackio and the Hub's client read their environment when they are imported, and a Space, a server
or a webhook that is named there would be sent the run. The process therefore gets none of
Trackio's variables but the folder, and the Hub's client is offline: it would ask the Hub for the
name of the exporting user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

from ampscope.errors import AmpscopeError, BadInput
from ampscope.ext.trackers.steps import PROJECT, Axis, ExportSummary, exported_steps, require
from ampscope.records import RunInfo
from ampscope.store.reader import Reader

_REFUSED = 2  # the process's exit status when it says why on standard error


def write_trackio(reader: Reader, info: RunInfo, out: Path, axis: Axis) -> ExportSummary:
    """Write ``out/trackio``. Raises BadInput without trackio, when that folder holds an export of
    the run already, and when Trackio reports that something was not written."""
    require("trackio", "trackio")
    folder = out.absolute() / "trackio"
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__, str(reader.path.absolute()), info.id, axis],
        env=local_environment(dict(os.environ), folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        refused = done.returncode == _REFUSED
        raise BadInput(lines[-1] if refused else f"Trackio cannot write {folder}: {lines[-1]}")
    return ExportSummary(out / "trackio", **json.loads(done.stdout))


def local_environment(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """``environment`` with which Trackio writes into ``folder`` and sends nothing."""
    kept = {name: text for name, text in environment.items() if not name.startswith("TRACKIO_")}
    return kept | {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"}


def _write(reader: Reader, info: RunInfo, axis: Axis) -> ExportSummary:
    import trackio

    folder = Path(os.environ["TRACKIO_DIR"])
    name = f"{info.title} ({info.id})"  # Trackio tells runs apart by their names
    with contextlib.suppress(ValueError):  # it has no such project yet
        if any(run.name == name for run in trackio.Api().runs(PROJECT)):
            raise BadInput(f"{folder} holds this run already. Remove it, or choose another --out.")
    summary = ExportSummary(folder)
    with warnings.catch_warnings(record=True) as reported:  # how Trackio tells of all that failed
        warnings.simplefilter("always")
        trackio.init(
            PROJECT,
            name=name,
            config=dataclasses.asdict(info.spec),
            embed=False,
            auto_log_gpu=False,  # this machine is not the one that trained
            auto_log_cpu=False,
        )
        for step in exported_steps(reader, info, axis):
            values: dict[str, object] = dict(step.scalars)
            for of, found in step.histograms.items():
                if found.counts.size:
                    values[of] = trackio.Histogram(np_histogram=(found.counts, found.edges))
            trackio.log(values, step=step.step)
            summary.count(step)
        trackio.finish()
    if reported:
        raise BadInput(f"Trackio reports of {folder}: {reported[0].message}")
    return summary


def main(store: str, run: str, axis: Axis) -> None:
    """Write the run into the folder that the environment names; print the counts as JSON."""
    with contextlib.redirect_stdout(sys.stderr), Reader(Path(store)) as reader:
        summary = _write(reader, reader.run(run), axis)
    counts = dataclasses.asdict(summary)
    del counts["folder"]
    print(json.dumps(counts))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])  # type: ignore[arg-type]  # the parent wrote them
    except AmpscopeError as error:
        print(error, file=sys.stderr)
        sys.exit(_REFUSED)
