"""``ampscope export``: a run for TensorBoard, MLflow, Trackio or W&B, with unscaled gradients.
``ampscope metrics``: a Prometheus endpoint over the store."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path

import click

from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.ext.trackers.mlflow_folder import write_mlflow
from ampscope.ext.trackers.prometheus import serve
from ampscope.ext.trackers.steps import PROJECT, Axis
from ampscope.ext.trackers.tensorboard_file import write_tensorboard
from ampscope.ext.trackers.trackio_folder import write_trackio
from ampscope.ext.trackers.wandb_folder import write_wandb
from ampscope.store.codec import is_run_id
from ampscope.store.reader import Reader

_WRITERS = {
    "tensorboard": write_tensorboard,
    "wandb": write_wandb,
    "mlflow": write_mlflow,
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
            info = reader.run(run)
            if not is_run_id(info.id):  # a folder is called so
                raise BadInput(info.message)
            summary = _WRITERS[program](reader, info, out, axis)
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
