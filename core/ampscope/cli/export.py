"""``ampscope export``: a run for TensorBoard, MLflow, Trackio or W&B, with unscaled gradients."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path

import click

from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.exports import steps
from ampscope.exports.prometheus import serve
from ampscope.exports.steps import PROJECT, Axis
from ampscope.exports.trackio_folder import write_trackio
from ampscope.files import write_whole
from ampscope.report.build import document, of_reports
from ampscope.report.html import to_html
from ampscope.report.markdown import to_markdown, to_notebook
from ampscope.store.reader import Reader

# ``ampscope report``: runs and diagnoses as files to hand on.


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


_WRITERS = {
    "tensorboard": steps.write_tensorboard,
    "wandb": steps.write_wandb,
    "mlflow": steps.write_mlflow,
    "trackio": write_trackio,
}


@click.command()
@click.argument("run")
@click.option("--to", "program", type=click.Choice(tuple(_WRITERS)), required=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option(
    "--axis",
    type=click.Choice(("magnitude", "log2")),
    default="log2",
    show_default=True,
    help="What histograms are over. Programs that draw a linear axis show log2 better.",
)
@store_option
def export(run: str, program: str, out: Path, axis: Axis, store: Path) -> None:
    """Export RUN for TensorBoard, for MLflow or Trackio as a local folder, or for W&B as an offline
    run; gradients are unscaled."""
    try:
        with Reader(store) as reader:
            summary = _WRITERS[program](reader, reader.run(run), out, axis)
    except OSError as error:
        raise BadInput(f"Cannot write {out}: {error.strerror or error}.") from error
    click.echo(summary.sentence())
    command = ["wandb", "sync", str(summary.folder)]
    if program == "tensorboard":  # of all runs that were exported there
        command = ["tensorboard", "--logdir", str(out)]
    if program == "mlflow":  # mlflow-skinny, which wrote it, has no such server
        command = ["MLFLOW_ALLOW_FILE_STORE=true", "mlflow", "ui"]
        command += ["--backend-store-uri", str(summary.folder)]
    if program == "trackio":
        command = [f"TRACKIO_DIR={summary.folder}", "trackio", "show", "--project", PROJECT]
    click.echo("Look at it with: " + shlex.join(command))


# ``ampscope metrics``: a Prometheus endpoint over the store.


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", default=9464, show_default=True, type=click.IntRange(0, 65535))
@store_option
def metrics(host: str, port: int, store: Path) -> None:
    """Serve scale, skips, lost share and step time of running trainings to Prometheus."""
    try:
        address, stop = serve(store, host, port)
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"Cannot listen at {host}:{port}: {reason}. Choose another --port.") from (
            error
        )
    click.echo(f"{address} (end with Ctrl+C)")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        stop()
