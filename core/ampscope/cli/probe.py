"""``ampscope probe``: one run per precision, with progress, then a short table."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ampscope import extensions
from ampscope.cli import options
from ampscope.cli.progress import leave, start_together
from ampscope.cli.tables import messages, probe_table, run_as_json
from ampscope.control import Control, list_changes
from ampscope.errors import BadInput
from ampscope.launcher.launch import checked
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.pythons import TORCH
from ampscope.record_json import dumps
from ampscope.records import Cadence, RunSpec, ScalerSpec
from ampscope.store.reader import Reader

_SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
_CADENCE = ("histogram_every", "trace_every", "shadow_every")


@click.command()
@click.argument("workload")
@options.size_option("tiny")
@click.option(
    "--precision",
    default="fp16",
    show_default=True,
    help=f"One or several, separated by commas: {', '.join(PRECISIONS)}.",
)
@click.option("--steps", default=50, show_default=True)
@options.seed_option
@options.device_option
@click.option(
    "--policy",
    type=click.Choice(("auto", "cuda", "native")),
    default="auto",
    show_default=True,
    help="On a CPU: rehearse CUDA's autocast lists and Tensor Core arithmetic, or the CPU's own.",
)
@click.option("--init-scale", default=65536.0, show_default=True, help="GradScaler's first scale.")
@click.option("--growth-factor", default=2.0, show_default=True)
@click.option("--backoff-factor", default=0.5, show_default=True)
@click.option("--growth-interval", default=2000, show_default=True, help="Finite steps to growth.")
@click.option("--loss-factor", default=1.0, show_default=True, help="Multiplies the loss.")
@click.option("--histogram-every", default=1, show_default=True, help="Steps; 0 is never.")
@click.option("--trace-every", default=1, show_default=True, help="Steps; 0 is never.")
@click.option("--shadow-every", default=10, show_default=True, help="Steps; 0 is never.")
@options.time_limit_option(600.0, "Seconds per run.")
@click.option(
    "--memory-limit",
    "memory_limit_mib",
    default=0,
    help="MiB of private memory per run; 0 is no limit.",
)
@click.option(
    "--framework",
    type=click.Choice((TORCH, *extensions.frameworks())),
    default="torch",
    show_default=True,
    help="Keras and Paddle train the shared networks; see ampscope frameworks.",
)
@click.option(
    "--op-list",
    "op_lists",
    multiple=True,
    metavar="OP=LIST",
    help="What if OP ran in half, fp32, widest or as_it_comes? Runs both ways.",
)
@click.option("--label", default="", help="How the run is listed.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@options.leave_out_option
@options.store_option
def probe(
    workload: str,
    precision: str,
    op_lists: tuple[str, ...],
    as_json: bool,
    store: Path,
    **given: Any,
) -> None:
    """Record a short training of WORKLOAD: a built-in model, path/to/file.py:build or
    package.module:build."""
    names = dict.fromkeys(name.strip() for name in precision.split(",") if name.strip())
    if not names:
        raise BadInput(f"Name at least one precision of: {', '.join(PRECISIONS)}.")
    group = secrets.token_hex(4)
    controls = ["", Control.of(op_lists=list_changes(",".join(op_lists)))] if op_lists else [""]
    scaler = ScalerSpec(*map(given.pop, _SCALER))
    cadence = Cadence(*map(given.pop, _CADENCE))
    base = RunSpec(
        workload=options.absolute(workload), scaler=scaler, cadence=cadence, group=group, **given
    )
    specs = [
        checked(dataclasses.replace(base, precision=name, control=control))
        for name in names
        for control in controls
    ]
    infos = start_together(specs, store)
    with Reader(store) as reader:
        if as_json:
            click.echo(dumps([run_as_json(reader, info) for info in infos], indent=2))
        elif any(info.steps_done for info in infos):
            Console().print(probe_table(reader, infos))
    for sentence in messages(infos):
        click.echo(sentence, err=True)
    leave(infos)
