"""``ampscope runs ranks``: the ranks of one training side by side, and which went bad first."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ampscope.analysis.ranks import first_nonfinite, grouped, is_rank
from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.report.plain import visible
from ampscope.store.reader import Reader


@click.command()
@click.argument("run")
@store_option
def ranks(run: str, store: Path) -> None:
    """All ranks of the training that RUN is a rank of. Exit status 1 when one went non-finite."""
    with Reader(store) as reader:
        info = reader.run(run)
        if not is_rank(info):
            raise BadInput(f"Run {info.id} is not a rank of a training of several.")
        trainings = grouped(reader.group(info.spec.group))
        found = {
            r.spec.rank: r
            for ranks in trainings
            if any(r.id == info.id for r in ranks)
            for r in ranks
        }
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
    click.echo(visible(first.sentence) if first else "No rank saw a value that is not finite.")
    raise SystemExit(1 if first else 0)
