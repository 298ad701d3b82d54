"""``ampscope report``: runs and diagnoses as files to hand on."""

from __future__ import annotations

from pathlib import Path

import click

from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.files import write_whole
from ampscope.render.html import to_html
from ampscope.render.markdown import to_markdown, to_notebook
from ampscope.store.reader import Reader
from ampscope.story.build import document, of_reports

STANDARD_OUTPUT = Path("-")
_OUT = click.Path(path_type=Path, allow_dash=True, dir_okay=False)


@click.command()
@click.argument("run", nargs=-1, required=True)
@click.option("--html", type=_OUT, help="One file for a browser; it needs no network.")
@click.option("--markdown", type=_OUT, help="For an issue tracker.")
@click.option("--notebook", type=_OUT, help="A notebook (.ipynb) that loads the runs.")
@click.option(
    "--as-recorded",
    is_flag=True,
    help="Keep the home folder, the machine's name, the store's folder.",
)
@store_option
def report(
    run: tuple[str, ...],
    html: Path | None,
    markdown: Path | None,
    notebook: Path | None,
    as_recorded: bool,
    store: Path,
) -> None:
    """Write a report of each RUN: verdict, evidence, charts, fix, machine, and what is missing.

    RUN is an id or a unique beginning of one. A run of a diagnosis stands for the whole diagnosis,
    as it was concluded; nothing is run. ``-`` is standard output.
    """
    if html is None and markdown is None and notebook is None:
        raise BadInput(
            "Say what to write: --html OUT.html, --markdown OUT.md, --notebook OUT.ipynb"
        )
    paths = [path for path in (html, markdown, notebook) if path is not None]
    if len(set(paths)) < len(paths):
        raise BadInput("Each report needs a file of its own.")
    with Reader(store) as reader:
        made = document(reader, run, as_recorded=as_recorded)
        infos = of_reports(reader, run)
    if html is not None:
        _write(html, to_html(made))
    if markdown is not None:
        _write(markdown, to_markdown(made))
    if notebook is not None:
        _write(
            notebook,
            to_notebook(made, infos, store.absolute() if as_recorded else Path(store.name)),
        )


def _write(path: Path, text: str) -> None:
    if path == STANDARD_OUTPUT:
        click.echo(text, nl=False)
        return
    try:
        write_whole(path, text)
    except OSError as error:
        raise BadInput(f"Cannot write {path}: {error.strerror}.") from error
    click.echo(path)
