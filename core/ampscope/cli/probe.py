"""``ampscope probe``: one run per precision, with progress, then a short table."""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ampscope.cli.options import store_option
from ampscope.cli.tables import probe_table, run_as_json
from ampscope.experiments.launch import POLL_S, launch
from ampscope.experiments.validate import checked
from ampscope.policy.modes import PRECISIONS
from ampscope.records import Cadence, RunInfo, RunSpec, ScalerSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import request_cancel
from ampscope.workloads.catalog import BUILTIN, SIZES

EXIT_FAILED = 1
EXIT_CANCELLED = 130  # the shell's own status for Ctrl-C


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
@click.option("--time-limit", default=600.0, show_default=True, help="Seconds a run.")
@click.option("--memory-limit", default=0, help="MiB of private memory a run; 0 is no limit.")
@click.option("--label", default="", help="How the run is listed.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
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
    label: str,
    as_json: bool,
    store: Path,
) -> None:
    """Record a short training of WORKLOAD: a built-in model, path/to/file.py:build or
    package.module:build."""
    names = [name.strip() for name in precision.split(",") if name.strip()]
    group = secrets.token_hex(4)
    specs = [
        checked(
            RunSpec(
                workload=_absolute(workload),
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
            )
        )
        for name in names
    ]
    if not specs:
        raise click.UsageError("Name at least one precision.")
    # All start at once: while one trains, the others import torch and wait for the device.
    ids = [launch(spec, store) for spec in specs]
    infos = _follow(store, ids, steps, Console(stderr=True))
    if as_json:
        with Reader(store) as reader:
            click.echo(json.dumps([run_as_json(reader, info) for info in infos], indent=2))
    else:
        with Reader(store) as reader:
            Console().print(probe_table(reader, infos))
    for info in infos:
        if info.state is not State.FINISHED:
            click.echo(f"{info.title}: {info.message or info.state}", err=True)
    if any(info.state is State.CANCELLED for info in infos):
        sys.exit(EXIT_CANCELLED)
    if any(info.state is not State.FINISHED for info in infos):
        sys.exit(EXIT_FAILED)


def _absolute(workload: str) -> str:
    """A user's file is found again whatever the child's working directory is."""
    path, colon, function = workload.partition(":")
    if workload in BUILTIN or not path.endswith(".py"):
        return workload
    return f"{Path(path).absolute()}{colon}{function}"


def _follow(store: Path, ids: list[str], steps: int, console: Console) -> list[RunInfo]:
    """Show progress until all runs have ended; Ctrl-C asks them to stop and waits for that."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress, Reader(store) as reader:
        tasks = {
            run_id: progress.add_task(reader.run(run_id).title, total=steps, note="", start=False)
            for run_id in ids
        }
        while True:
            try:
                infos = [reader.run(run_id) for run_id in ids]
                for info in infos:
                    if info.state is not State.QUEUED:
                        progress.start_task(tasks[info.id])
                    note = f"waits, place {info.place}" if info.place else str(info.state)
                    progress.update(tasks[info.id], completed=info.steps_done, note=note)
                    if not info.state.is_active:
                        progress.stop_task(tasks[info.id])
                if not any(info.state.is_active for info in infos):
                    return infos
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                console.print("Stopping; what was recorded is kept.")
                for run_id in ids:
                    request_cancel(store, run_id)
