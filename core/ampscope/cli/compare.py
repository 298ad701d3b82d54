"""``ampscope compare``: precisions side by side on this machine, the verdict first."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ampscope.cli.measuring import measured
from ampscope.cli.options import store_option
from ampscope.cli.tables import plain_table
from ampscope.cli.workloads import absolute
from ampscope.compare.claims import claims
from ampscope.compare.export import comparison_json
from ampscope.compare.figures import figures
from ampscope.compare.verdict import verdict
from ampscope.compare.views import BASES, Measured, base_of, by_precision
from ampscope.errors import BadInput
from ampscope.policy.modes import PRECISIONS
from ampscope.records import AS_IS, Machine, RunSpec
from ampscope.whole_files import write_whole
from ampscope.workloads.catalog import SIZES
from ampscope.workloads.scripts import is_script


@click.command()
@click.argument("workload")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--size", type=click.Choice(SIZES), default="small", show_default=True)
@click.option(
    "--precision",
    default="fp32,bf16,fp16",
    show_default=True,
    help=f"Several, separated by commas: {', '.join(PRECISIONS)}.",
)
@click.option("--seeds", default=3, show_default=True, help="Trainings a precision.")
@click.option("--steps", default=30, show_default=True, help="A seed, fewer where time is short.")
@click.option("--seed", default=0, show_default=True, help="The first one.")
@click.option("--batch", default=0, help="Samples a step; 0: as the workload gives them.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--time-limit", default=170.0, show_default=True, help="Seconds.")
@click.option("--price", default=0.0, help="Of this machine an hour, in any currency.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write everything there.")
@store_option
def compare(
    workload: str,
    args: tuple[str, ...],
    size: str,
    precision: str,
    seeds: int,
    steps: int,
    seed: int,
    batch: int,
    device: str,
    time_limit: float,
    price: float,
    out: Path | None,
    store: Path,
) -> None:
    """Measure WORKLOAD in several precisions, turn and turn about: time, memory, energy, loss.

    WORKLOAD is a built-in model, path/to/file.py:build, package.module:build, or a training script
    path/to/train.py, untouched, with its ARGS (after -- where they begin with a hyphen).
    """
    script = is_script(workload)
    if args and not script:
        raise BadInput(f"{workload} takes no arguments; only a script does.")
    spec = RunSpec(
        workload=absolute(workload),
        args=args,
        kind="compare",
        size=size,
        precision=precision,
        steps=steps,
        seed=seed,
        seeds=seeds,
        batch=batch,
        device=device,
        policy="native",  # a rehearsal of CUDA's rules says nothing about time
        time_limit_s=time_limit,
        control=AS_IS if script else "",
        label=f"{Path(workload).name}: {precision}" if script else "",
    )
    info, results, disturbed = measured(spec, store)
    found = by_precision(results)
    click.echo(verdict(found).sentence)
    console = Console()
    console.print(_table(found, price))
    base = base_of(found)
    for other in found:
        if base is not None and other.precision not in BASES:
            console.print(_claims(base, other, info.machine))
    if out is not None:
        write_whole(out, comparison_json(info, results, disturbed) + "\n")


def _table(found: tuple[Measured, ...], price: float) -> Table:
    """Figures downwards, precisions across: 80 columns are few."""
    table = plain_table("")
    table.add_column("")
    for m in found:
        table.add_column(m.precision, justify="right")
    base = base_of(found)
    for label, cell in figures(base, price):
        cells = [cell(m) for m in found]
        if any(cells):
            table.add_row(label, *(text or "unknown" for text in cells))
    return table


def _claims(base: Measured, other: Measured, machine: Machine | None) -> Table:
    table = plain_table(f"What articles promise, and {other.precision} here")
    for name in ("promise", "measured", "why"):
        table.add_column(name)
    for claim in claims(base, other, machine):
        table.add_row(claim.claim, escape(claim.measured), escape(claim.why))
    return table
