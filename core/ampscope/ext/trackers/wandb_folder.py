"""A run as a Weights & Biases offline folder, written by wandb itself; nothing is sent anywhere.

``wandb sync FOLDER`` uploads it, when and where its owner wants.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from ampscope.ext.trackers.steps import PROJECT, Axis, ExportSummary, exported_steps, require
from ampscope.records import RunInfo
from ampscope.store.reader import Reader


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
