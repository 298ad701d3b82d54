"""``ampscope report``: runs and diagnoses as files to hand on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.report.document import Document
from ampscope.report.html.page import to_html
from ampscope.report.making import document
from ampscope.store.reader import Reader

STANDARD_OUTPUT = Path("-")
_OUT = click.Path(path_type=Path, allow_dash=True, dir_okay=False)


@click.command()
@click.argument("run", nargs=-1, required=True)
@click.option("--html", type=_OUT, help="One file for a browser; it needs no network.")
@store_option
def report(run: tuple[str, ...], html: Path | None, store: Path) -> None:
    """Write a report of each RUN: verdict, evidence, charts, fix, machine, and what is missing.

    RUN is an id or a unique beginning of one. A run of a diagnosis stands for the whole diagnosis,
    which is judged anew from what was recorded; nothing is run. ``-`` is standard output.
    """
    wanted: list[tuple[Path, Callable[[Document], str]]] = []
    wanted += [(html, to_html)] if html is not None else []
    if not wanted:
        raise BadInput("Say what to write: --html OUT.html")
    with Reader(store) as reader:
        made = document(reader, run)
    for path, form in wanted:
        _write(path, form(made))


def _write(path: Path, text: str) -> None:
    if path == STANDARD_OUTPUT:
        click.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"Cannot write {path}: {error.strerror}.") from error
    click.echo(path)
