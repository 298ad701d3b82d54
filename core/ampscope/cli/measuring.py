"""Start one measurement as a child process, show its progress, and give back how it ended."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from ampscope.analysis.telemetry import others_bound, spoiled
from ampscope.cli.progress import ask_to_stop, follow
from ampscope.experiments.launch import launch
from ampscope.experiments.validate import checked
from ampscope.records import Result, RunInfo, RunSpec, State
from ampscope.store.reader import Reader

EXIT_FAILED = 1
EXIT_CANCELLED = 130  # the shell's own status for Ctrl-C


def measured(spec: RunSpec, store: Path) -> tuple[RunInfo, list[Result], tuple[str, ...]]:
    """The finished run, its results, and what disturbed it, which is said on standard error too.
    Ends the process, with one sentence on standard error, when
    it did not finish."""
    run_id = launch(checked(spec), store)
    try:
        info = follow(store, [run_id], Console(stderr=True))[0]
    except BaseException:  # Ctrl-C a second time: it must not go on unseen
        ask_to_stop(store, [run_id])
        raise
    if info.state is not State.FINISHED:
        click.echo(f"{info.id} ({info.title}): {info.message or info.state}", err=True)
        sys.exit(EXIT_CANCELLED if info.state is State.CANCELLED else EXIT_FAILED)
    if info.message:
        click.echo(info.message, err=True)
    with Reader(store) as reader:
        disturbed = spoiled(reader.samples(run_id), others_bound(spec))
        results = reader.results(run_id)
    for sentence in disturbed:
        click.echo(f"This measurement was disturbed. {sentence}", err=True)
    return info, results, disturbed
