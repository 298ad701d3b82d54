"""Replay every zoo case's scaler at its own settings: is it what was recorded?

    ampscope zoo --store zoo.db
    python benchmarks/zoo_replay.py zoo.db --json benchmarks/results/zoo_replay.json

A run that parts from its replay has other settings than its framework's defaults, or a scaler whose
state was set by hand; the dashboard says so beside its scaler lab.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from ampscope.control import BASELINE
from ampscope.numerics.formats import FP16
from ampscope.observations import Call
from ampscope.records import Frame, Role, RunInfo
from ampscope.scalers.replay import first_difference, own_policy, own_settings, recorded_run
from ampscope.store.reader import Reader

ROLES = (Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)


@click.command()
@click.argument("store", type=click.Path(path_type=Path, exists=True))
@click.option("--json", "out", type=click.Path(path_type=Path))
def main(store: Path, out: Path | None) -> None:
    """Print one line per run, and write the figures."""
    rows = []
    with Reader(store) as reader:
        for info in reader.runs(10_000):
            if info.spec.kind == "script" and info.spec.control == BASELINE:
                rows += filter(None, [replayed(reader, info)])
    agree = sum(row["first_difference"] is None for row in rows)
    for row in rows:
        click.echo(f"{row['script']:40} {row['steps']:4} steps, {row['says']}")
    click.echo(f"{agree} of {len(rows)} runs with a scaler are what their replay says.")
    if out is not None:
        result = {"agree": agree, "runs": len(rows), "each": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


def replayed(reader: Reader, info: RunInfo) -> dict[str, object] | None:
    """One run; None without a scaler or histograms."""
    steps = reader.steps(info.id)
    if not steps or steps[0].scale is None:
        return None
    frames = {(frame.step, role): frame for role in ROLES for frame in reader.frames(info.id, role)}

    def frames_of(step: int) -> Sequence[Frame]:
        return [frames[step, role] for role in ROLES if (step, role) in frames]

    calls = [o for o in reader.observations(info.id) if isinstance(o, Call)]
    seen = recorded_run(steps, frames_of, FP16, calls)
    own = own_settings(info.spec, steps[0].scale)
    odd = first_difference(seen, steps, own_policy(info.spec), own)
    scalers = {c.subject for c in calls if c.name == "scaler_step"}
    made = sum(c.name == "scaler_new" for c in calls)
    why = f"parts at step {odd}; {len(scalers)} scalers step, {made} were made"
    return {
        "script": Path(info.spec.workload).name,
        "steps": len(steps),
        "first_difference": odd,
        "says": "as recorded" if odd is None else why,
    }


if __name__ == "__main__":
    main()
