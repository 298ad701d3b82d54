"""Run a recorded script again under other controls, as runs of the same diagnosis.

    python -m ampscope.experiments.repeat --store FILE --run RUN_ID CONTROL…

What is run (file, arguments, limits, policy) is read from the store, so whoever asks names a run
and a control and nothing else.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from ampscope.errors import AmpscopeError, BadInput
from ampscope.experiments.script_runs import ScriptRuns
from ampscope.privacy import is_masked
from ampscope.records import RunInfo, RunSpec
from ampscope.store.reader import Reader

EXIT_COULD_NOT_RUN = 2


def repeat(store: Path, run_id: str, controls: tuple[str, ...]) -> None:
    """One run of the script for each control, one after another."""
    with Reader(store) as reader:
        info = reader.run(run_id)
        group = reader.group(info.spec.group)
    spec = repeatable(info)
    first = next((r for r in group if r.spec.control == "as_is"), info)
    with ScriptRuns(replace(spec, control="", parent=""), store, private=True) as runs:
        for control in controls:
            runs.run(control, parent=first.id)


def repeatable(info: RunInfo) -> RunSpec:
    """The run's spec. Raises BadInput for a probe, for an imported run, and for a script that is no
    longer there."""
    spec = info.spec
    if spec.kind != "script":
        raise BadInput("This run is a probe, not a script.")
    if spec.imported:  # its file and arguments are a stranger's words
        raise BadInput("This run was imported. Run its script yourself, with: ampscope diagnose")
    if is_masked(spec.args):
        raise BadInput(
            "Secrets among its arguments are not stored, so it cannot be run from here. Run it "
            "yourself, with: ampscope diagnose"
        )
    if not is_module(spec) and not _is_file(spec.workload):
        raise BadInput(f"There is no file {spec.workload} any more.")
    return spec


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # no name of a file
        return False


def is_module(spec: RunSpec) -> bool:
    """Whether the script was started as ``-m package.module``."""
    return spec.workload.startswith("-m ")


@click.command()
@click.option("--store", type=click.Path(path_type=Path), required=True)
@click.option("--run", "run_id", required=True)
@click.argument("controls", nargs=-1, required=True)
def main(store: Path, run_id: str, controls: tuple[str, ...]) -> None:
    """Run the script of RUN_ID under each of CONTROLS."""
    try:
        repeat(store, run_id, controls)
    except AmpscopeError as error:
        click.echo(f"ampscope: {error}", err=True)
        sys.exit(EXIT_COULD_NOT_RUN)


if __name__ == "__main__":
    main()
