"""``ampscope import``: runs that somebody exported, checked before they come near the store."""

from __future__ import annotations

from pathlib import Path

import click

from ampscope.cli.options import store_option
from ampscope.report.plain import visible
from ampscope.store.importing import import_file


@click.command("import")
@click.argument("file", nargs=-1, required=True, type=click.Path(path_type=Path))
@store_option
def import_runs(file: tuple[Path, ...], store: Path) -> None:
    """Read each FILE that `ampscope runs export` wrote, and keep its runs as new ones.

    Everything in a file is checked first; one that is refused leaves the store as it was. Runs that
    came in this way can be looked at, and are never run again from here.
    """
    for path in file:
        for run in import_file(path, store):
            named = "" if run.was == run.run_id else f", {run.was} in the file"
            click.echo(f"Imported {run.run_id}{named} ({visible(str(path))}).")
