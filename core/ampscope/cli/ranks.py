"""``ampscope runs ranks``: the ranks of one training side by side, and which went bad first."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ampscope.analysis.ranks import first_nonfinite
from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.records import RunInfo
from ampscope.store.reader import Reader


@click.command()
@click.argument("run")
@store_option
def ranks(run: str, store: Path) -> None:
    """All ranks of the training that RUN is a rank of. Exit status 1 when one went non-finite."""
    with Reader(store) as reader:
        info = reader.run(run)
        found = newest_of_each_rank(reader.group(info.spec.group))
        if not found:
            raise BadInput(f"Run {info.id} is not a rank of a training of several.")
        table = Table("rank", "run", "state", "steps", "last loss", "skipped", box=None)
        for rank, part in found.items():
            totals = reader.step_totals(part.id)
            last = reader.overview(part.id, first=totals.last_step) if totals.steps else []
            loss = "" if not last or last[-1].loss is None else f"{last[-1].loss:.5g}"
            cells = (str(rank), part.id, str(part.state), f"{part.steps_done:,}", loss)
            table.add_row(*cells, f"{totals.skipped:,}")
        first = first_nonfinite({r: reader.events(part.id) for r, part in found.items()})
    Console().print(table)
    missing = sorted(set(range(info.spec.world)) - found.keys())
    if missing:
        names = ", ".join(map(str, missing))
        click.echo(f"Ranks not in this store: {names}. Merge them: ampscope runs merge FILE …")
    click.echo(first.sentence if first else "No rank saw a value that is not finite.")
    raise SystemExit(1 if first else 0)


def newest_of_each_rank(runs: list[RunInfo]) -> dict[int, RunInfo]:
    """Of several trainings under one name the last counts; ranks in order."""
    newest = {run.spec.rank: run for run in sorted(runs, key=lambda run: run.created)}
    return dict(sorted(newest.items()))
