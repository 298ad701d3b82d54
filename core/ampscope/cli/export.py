"""``ampscope export``: a run for TensorBoard or Weights & Biases, with unscaled gradients."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.exports import tensorboard_events, wandb_run
from ampscope.exports.unscaled import Axis
from ampscope.store.reader import Reader

_WRITERS = {"tensorboard": tensorboard_events.write, "wandb": wandb_run.write}


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
    """Export RUN for TensorBoard, or for W&B as an offline run; gradients are unscaled."""
    try:
        with Reader(store) as reader:
            summary = _WRITERS[program](reader, reader.run(run), out, axis)
    except OSError as error:
        raise BadInput(f"Cannot write {out}: {error.strerror or error}.") from error
    click.echo(summary.sentence())
    command = ["wandb", "sync", str(summary.folder)]
    if program == "tensorboard":  # of all runs that were exported there
        command = ["tensorboard", "--logdir", str(out)]
    click.echo("Look at it with: " + shlex.join(command))
