"""``ampscope probe``: one run per precision, with progress, then a short table."""

from __future__ import annotations

import secrets
from pathlib import Path

import click
from rich.console import Console

from ampscope.cli.options import absolute, leave_out_option, store_option
from ampscope.cli.progress import leave, start_together
from ampscope.cli.tables import messages, probe_table, run_as_json
from ampscope.control import Control, list_changes
from ampscope.errors import BadInput
from ampscope.launcher.launch import checked
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.record_json import dumps
from ampscope.records import Cadence, RunSpec, ScalerSpec
from ampscope.store.reader import Reader
from ampscope.workloads.catalog import SIZES


@click.command()
@click.argument("workload")
@click.option("--size", type=click.Choice(SIZES), default="tiny", show_default=True)
@click.option(
    "--precision",
    default="fp16",
    show_default=True,
    help=f"One or several, separated by commas: {', '.join(PRECISIONS)}.",
)
@click.option("--steps", default=50, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
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
@click.option("--time-limit", default=600.0, show_default=True, help="Seconds per run.")
@click.option("--memory-limit", default=0, help="MiB of private memory per run; 0 is no limit.")
@click.option(
    "--framework",
    type=click.Choice(("torch", "keras", "paddle")),
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
@leave_out_option
@store_option
def probe(
    workload: str,
    size: str,
    precision: str,
    steps: int,
    seed: int,
    device: str,
    policy: str,
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    loss_factor: float,
    histogram_every: int,
    trace_every: int,
    shadow_every: int,
    time_limit: float,
    memory_limit: int,
    framework: str,
    op_lists: tuple[str, ...],
    label: str,
    as_json: bool,
    store: Path,
) -> None:
    """Record a short training of WORKLOAD: a built-in model, path/to/file.py:build or
    package.module:build."""
    names = dict.fromkeys(name.strip() for name in precision.split(",") if name.strip())
    if not names:
        raise BadInput(f"Name at least one precision of: {', '.join(PRECISIONS)}.")
    group = secrets.token_hex(4)
    controls = ["", Control.of(op_lists=list_changes(",".join(op_lists)))] if op_lists else [""]
    specs = [
        checked(
            RunSpec(
                workload=absolute(workload),
                size=size,
                precision=name,
                steps=steps,
                seed=seed,
                device=device,
                policy=policy,
                scaler=ScalerSpec(init_scale, growth_factor, backoff_factor, growth_interval),
                cadence=Cadence(histogram_every, trace_every, shadow_every),
                loss_factor=loss_factor,
                time_limit_s=time_limit,
                memory_limit_mib=memory_limit,
                label=label,
                group=group,
                framework=framework,
                control=control,
            )
        )
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
