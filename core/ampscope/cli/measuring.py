"""Start one measurement as a child process, show its progress, and give back how it ended."""

from __future__ import annotations

from pathlib import Path

import click

from ampscope.analysis.telemetry import others_bound, spoiled
from ampscope.cli.progress import leave, start_together
from ampscope.experiments.validate import checked
from ampscope.records import Result, RunInfo, RunSpec, State
from ampscope.store.reader import Reader


def measured(spec: RunSpec, store: Path) -> tuple[RunInfo, list[Result], tuple[str, ...]]:
    """The finished run, its results, and what disturbed it, which is said on standard error too.
    Ends the process, with one sentence on standard error, when it did not finish."""
    info = start_together([checked(spec)], store)[0]
    if info.state is not State.FINISHED:
        click.echo(f"{info.id} ({info.title}): {info.message or info.state}", err=True)
    leave([info])
    if info.message:
        click.echo(info.message, err=True)
    with Reader(store) as reader:
        disturbed = spoiled(reader.samples(info.id), others_bound(spec))
        results = reader.results(info.id)
    for sentence in disturbed:
        click.echo(f"This measurement was disturbed. {sentence}", err=True)
    return info, results, disturbed
