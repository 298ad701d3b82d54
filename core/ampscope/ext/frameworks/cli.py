"""``ampscope frameworks``: Keras and Paddle beside PyTorch.

ampscope frameworks install paddle     an environment of its own for it
ampscope frameworks check              what is there, and whether it works
ampscope frameworks compare lenet      the same network in all that are there
ampscope frameworks rewrite            TensorFlow's graph rewrite, op by op
ampscope frameworks plan train.py      dtypes of a Paddle script's ops on a GPU
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console

from ampscope.cli.options import store_option
from ampscope.cli.progress import EXIT_FAILED, leave, start_together
from ampscope.cli.tables import messages, probe_table
from ampscope.errors import BadInput
from ampscope.ext.frameworks import FRAMEWORKS
from ampscope.ext.frameworks.checks import PRECISIONS
from ampscope.ext.frameworks.environments import check, install
from ampscope.ext.frameworks.keras.graph_rewrite import report
from ampscope.ext.frameworks.networks import NAMES
from ampscope.launcher.launch import checked
from ampscope.pythons import TORCH, python_for, why_missing, with_package
from ampscope.records import RunSpec
from ampscope.store.reader import Reader


@click.group()
def frameworks() -> None:
    """Keras and Paddle beside PyTorch: install, check, compare."""


@frameworks.command("install")
@click.argument("name", type=click.Choice(tuple(FRAMEWORKS)))
def install_framework(name: str) -> None:
    """Make an environment of its own for a framework, about 1 to 2 GB."""
    result = install(name, lambda text: click.echo(text, err=True))
    click.echo(result.sentence)
    if not result.works:
        sys.exit(EXIT_FAILED)


@frameworks.command("check")
@click.argument("name", type=click.Choice(tuple(FRAMEWORKS)), required=False)
def check_frameworks(name: str | None) -> None:
    """Import each framework in its own process, and say what came of it."""
    results = [check(each) for each in ((name,) if name else FRAMEWORKS)]
    for result in results:
        click.echo(result.sentence)
    if not all(result.works for result in results):
        sys.exit(EXIT_FAILED)


@frameworks.command()
@click.argument("network", type=click.Choice(NAMES))
@click.option("--precision", default="fp16", show_default=True, type=click.Choice(PRECISIONS))
@click.option("--steps", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True)
@store_option
def compare(network: str, precision: str, steps: int, seed: int, store: Path) -> None:
    """The same weights and batches in PyTorch and in every framework that is there."""
    missing = {name: why for name in FRAMEWORKS if (why := why_missing(name))}
    if len(missing) == len(FRAMEWORKS):
        raise BadInput(f"Neither Keras nor Paddle is here. {' '.join(missing.values())}")
    for why in missing.values():
        click.echo(f"Left out: {why}", err=True)
    names = [TORCH, *(name for name in FRAMEWORKS if name not in missing)]
    group = secrets.token_hex(4)
    specs = [
        checked(
            RunSpec(
                workload=f"shared-{network}",
                precision=precision,
                steps=steps,
                seed=seed,
                framework=name,
                group=group,
                label=f"{network} {precision} in {name}",
            )
        )
        for name in names
    ]
    infos = start_together(specs, store)
    with Reader(store) as reader:
        Console().print(probe_table(reader, infos))
    for sentence in messages(infos):
        click.echo(sentence, err=True)
    click.echo(f"Side by side: ampscope dashboard, page Frameworks (group {group}).")
    leave(infos)


@frameworks.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object in place of the tables.")
def rewrite(as_json: bool) -> None:
    """What TensorFlow's mixed-precision graph rewrite makes of a small training graph."""
    click.echo(report(python_for("keras"), as_json=as_json))


@frameworks.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("--half", default="fp16", show_default=True, type=click.Choice(("fp16", "bf16")))
@click.option("--json", "as_json", is_flag=True, help="One JSON object in place of the table.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def plan(half: str, as_json: bool, script: str, args: tuple[str, ...]) -> None:
    """Which op of a Paddle script would run in which dtype on a GPU, under O1 and under O2."""
    module, options = "ampscope.ext.frameworks.paddle.plan", ["--json"] if as_json else []
    command = [python_for("paddle"), "-m", module, f"--half={half}", *options, script, *args]
    sys.exit(subprocess.run(command, check=False, env=with_package({**os.environ})).returncode)
