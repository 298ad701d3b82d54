"""``ampscope runs``: list, show, delete, export and merge what stores hold, and the ranks of one
training side by side; ``ampscope import``: what another machine exported."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ampscope.analysis.ranks import first_nonfinite, grouped, is_rank
from ampscope.cli.options import store_option
from ampscope.cli.tables import messages, run_as_json, runs_table
from ampscope.errors import BadInput
from ampscope.number_words import plural
from ampscope.record_json import dumps
from ampscope.store import export as exports
from ampscope.store import merging
from ampscope.store.importing import import_file
from ampscope.store.reader import Reader
from ampscope.store.writer import delete_run, request_cancel
from ampscope.story.document import line, visible

MOST_RANKS_NAMED = 20  # of those that are missing


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
    missing = [rank for rank in range(info.spec.world) if rank not in found]
    if missing:
        names = ", ".join(map(str, missing[:MOST_RANKS_NAMED]))
        if len(missing) > MOST_RANKS_NAMED:
            names += f" and {len(missing) - MOST_RANKS_NAMED:,} more"
        click.echo(
            f"Ranks not in this store: {names}. Merge them: ampscope runs merge --trust FILE …"
        )
    click.echo(visible(first.sentence) if first else "No rank saw a value that is not finite.")
    raise SystemExit(1 if first else 0)


@click.group()
def runs() -> None:
    """List, show, cancel, delete, export and merge recorded runs."""


runs.add_command(ranks)


@runs.command("list")
@click.option("--limit", default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@store_option
def list_runs(limit: int, as_json: bool, store: Path) -> None:
    """Newest first."""
    with Reader(store) as reader:
        infos = reader.runs(limit)
        if as_json:
            click.echo(dumps([run_as_json(reader, info) for info in infos], indent=2))
        elif infos:
            Console().print(runs_table(infos))
            for sentence in messages(infos):
                click.echo(sentence)
        else:
            click.echo("The store is empty. Record a run with: ampscope probe gpt")


@runs.command()
@click.argument("run")
@store_option
def show(run: str, store: Path) -> None:
    """One run as JSON; RUN is its id or a unique beginning of it."""
    with Reader(store) as reader:
        click.echo(dumps(run_as_json(reader, reader.run(run)), indent=2))


@runs.command()
@click.argument("run")
@store_option
def cancel(run: str, store: Path) -> None:
    """Ask an active run to stop."""
    with Reader(store) as reader:
        info = reader.run(run)
    if not info.state.is_active:
        click.echo(f"{info.id} is {info.state} already.")
        return
    request_cancel(store, info.id)
    click.echo(f"{info.id} was asked to stop.")


@runs.command()
@click.argument("run", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that wait or work.")
@store_option
def stop(run: tuple[str, ...], every: bool, store: Path) -> None:
    """Ask runs to stop, no matter who started them."""
    if bool(run) == every:
        raise BadInput("Name runs to stop, or say --all.")
    with Reader(store) as reader:
        infos = [reader.run(name) for name in run] if run else reader.active()
    for info in infos:
        if info.state.is_active:
            request_cancel(store, info.id)
            click.echo(f"{info.id} ({line(info.title)}) was asked to stop.")
        else:
            click.echo(f"{info.id} is {info.state} already.")
    if not infos:
        click.echo("No run waits or works.")


@runs.command()
@click.argument("run", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@store_option
def delete(run: tuple[str, ...], yes: bool, store: Path) -> None:
    """Delete runs and everything recorded of them."""
    with Reader(store) as reader:
        infos = [reader.run(name) for name in run]
    for info in infos:
        if yes or click.confirm(f"Delete {info.id} ({line(info.title)}, {info.steps_done} steps)?"):
            delete_run(store, info.id)
            click.echo(f"Deleted {info.id}.")


@runs.command()
@click.argument("run", nargs=-1, required=True)
@click.option("--together", is_flag=True, help="With the runs that were started together with it.")
@click.option("--format", "kind", type=click.Choice(("json", "parquet")), default="json")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@store_option
def export(run: tuple[str, ...], together: bool, kind: str, out: Path, store: Path) -> None:
    """Export runs: one JSON file (`ampscope import` reads it), or of one run a folder of Parquet
    files, one a table."""
    with Reader(store) as reader:
        infos = {info.id: info for info in map(reader.run, run)}
        if together:
            others = [r for info in infos.values() for r in reader.group(info.spec.group)]
            infos |= {r.id: r for r in others}
        if kind == "parquet" and len(infos) > 1:
            raise BadInput("A folder of Parquet files holds one run. Export the others apart.")
        written = (
            exports.to_json(reader, list(infos.values()), out)
            if kind == "json"
            else exports.to_parquet(reader, next(iter(infos.values())), out)
        )
    for path in written:
        click.echo(path)


@runs.command()
@click.argument("stores", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--into",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The store that the runs are copied to; without it, that of --store.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="The stores are your own: their runs can be run again from here. Without it they are "
    "imported ones, which can be looked at alone.",
)
@store_option
def merge(stores: tuple[Path, ...], into: Path | None, trust: bool, store: Path) -> None:
    """Copy the runs of other STORES into one: files, or folders with one file per rank.

    Runs keep their ids; one that is there already with the same content is passed over.
    """
    target = into or store
    found = merging.stores_in(stores)
    results = []
    for result in merging.merge(found, target, trust=trust):
        what = "is there already" if result.was_there else "copied"
        click.echo(f"{result.run_id} {what} ({result.source}).")
        results.append(result)
    copied = sum(not result.was_there for result in results)
    whole, files = plural(len(results), "run"), plural(len(found), "store")
    click.echo(f"{target}: {copied} of {whole} copied from {files}.")
    if copied and not trust:
        click.echo(
            "They count as imported and are not run again from here; --trust says otherwise."
        )


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
