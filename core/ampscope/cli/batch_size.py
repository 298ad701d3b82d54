"""``ampscope batch-size``: the largest batch a precision, predicted and then proved."""

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
from ampscope.compare.batches import BatchSearch, by_precision, searches_json, sentence
from ampscope.compare.figures import seconds, size
from ampscope.errors import BadInput
from ampscope.hardware.describe import describe_machine, uses_cuda
from ampscope.policy.modes import PRECISIONS
from ampscope.records import RunSpec
from ampscope.whole_files import write_whole
from ampscope.workloads.catalog import SIZES
from ampscope.workloads.scripts import is_script


@click.command("batch-size")
@click.argument("workload")
@click.option("--size", type=click.Choice(SIZES), default="small", show_default=True)
@click.option(
    "--precision",
    default="fp32,bf16",
    show_default=True,
    help=f"Several, separated by commas: {', '.join(PRECISIONS)}.",
)
@click.option("--memory-limit", default=0, help="MiB that training may take; needed on a CPU.")
@click.option("--multiple-of", default=8, show_default=True, help="Sizes that are tried.")
@click.option("--power-of-two", is_flag=True, help="Try powers of two instead.")
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--time-limit", default=600.0, show_default=True, help="Seconds.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write everything there.")
@store_option
def batch_size(
    workload: str,
    size: str,
    precision: str,
    memory_limit: int,
    multiple_of: int,
    power_of_two: bool,
    seed: int,
    device: str,
    time_limit: float,
    out: Path | None,
    store: Path,
) -> None:
    """Find the largest batch of WORKLOAD that fits. Each try is a process of its own, so running
    out of memory harms nothing."""
    if is_script(workload):
        raise BadInput(
            f"{workload} is a script, whose batch cannot be changed from outside. Write a workload "
            "file: a function build(seed) that returns an ampscope.Workload."
        )
    if not memory_limit and not device.startswith("cuda") and not uses_cuda(describe_machine()):
        raise BadInput("On a CPU say how much memory training may take: --memory-limit MIB.")
    if multiple_of < 1:
        raise BadInput("--multiple-of takes a number from 1 on.")
    spec = RunSpec(
        workload=absolute(workload),
        kind="batch",
        size=size,
        precision=precision,
        seed=seed,
        device=device,
        policy="native",
        time_limit_s=time_limit,
        memory_limit_mib=memory_limit,
        multiple_of=0 if power_of_two else multiple_of,
    )
    info, results, disturbed = measured(spec, store)
    searches = by_precision(results)
    click.echo(sentence(searches))
    console = Console()
    for search in searches:
        console.print(_table(search))
    if out is not None:
        write_whole(out, searches_json(info, searches, disturbed) + "\n")


def _table(search: BatchSearch) -> Table:
    table = plain_table(f"{search.precision}: {_prediction(search)}")
    for name in ("samples", "fits", "peak memory", "time a step", "samples a second", ""):
        table.add_column(name, justify="left" if not name else "right")
    knee = search.knee
    for made in search.tries:
        peak = made.device_peak or made.peak_bytes
        rate = made.samples_s
        table.add_row(
            f"{made.samples:,}",
            "yes" if made.fits else "no",
            "" if peak is None else size(peak),
            "" if made.step is None else seconds(made.step.median_s),
            "" if rate is None else f"{rate:,.0f}",
            "nine tenths of the best" if made is knee else escape(made.how_it_ended),
        )
    return table


def _prediction(search: BatchSearch) -> str:
    found = search.prediction
    if found is None:
        return "no prediction: that takes two tries that fit, of which the larger needs more"
    return (
        f"predicted {found.largest:,}, from {size(found.fixed_bytes)} and "
        f"{size(found.bytes_per_sample)} a sample under {size(found.limit_bytes)}"
    )
