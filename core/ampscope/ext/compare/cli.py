"""``ampscope compare``: precisions side by side on this machine, the verdict first; ``ampscope
batch-size``: the largest batch of each, predicted and then run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ampscope.cli import options
from ampscope.cli.progress import measured
from ampscope.cli.tables import plain_table
from ampscope.errors import BadInput
from ampscope.ext.compare import batches, comparison
from ampscope.ext.compare.verdict import claims, comparison_json, verdict
from ampscope.files import write_whole
from ampscope.hardware.describe import describe_machine, uses_cuda
from ampscope.number_words import binary_size, seconds
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.records import Machine
from ampscope.workloads.catalog import is_script


@click.command()
@click.argument("workload")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@options.size_option("small")
@click.option(
    "--precision",
    default="fp32,bf16,fp16",
    show_default=True,
    help=f"Several, separated by commas: {', '.join(PRECISIONS)}.",
)
@click.option("--seeds", default=3, show_default=True, help="Trainings per precision.")
@click.option("--steps", default=30, show_default=True, help="A seed, fewer where time is short.")
@click.option("--seed", default=0, show_default=True, help="The first one.")
@click.option("--batch", default=0, help="Samples per step; 0: as the workload gives them.")
@options.device_option
@options.time_limit_option(170.0)
@click.option("--price", default=0.0, help="Of this machine an hour, in any currency.")
@options.json_file_option
@options.store_option
def compare(
    workload: str,
    args: tuple[str, ...],
    precision: str,
    price: float,
    out: Path | None,
    store: Path,
    **fields: Any,
) -> None:
    """Measure WORKLOAD in several precisions, interleaved: step time, memory, energy, loss.

    WORKLOAD is a built-in model, path/to/file.py:build, package.module:build, or a training script
    path/to/train.py, untouched, with its ARGS (after -- where they begin with a hyphen).
    """
    label = f": {precision}"
    spec = options.measurement(
        "compare", workload, args, label=label, precision=precision, **fields
    )
    info, results, disturbed = measured(spec, store)
    found = comparison.by_precision(results)
    click.echo(verdict(found).sentence)
    console = Console()
    console.print(_table(found, price))
    base = comparison.base_of(found)
    for other in found:
        if base is not None and other.precision not in comparison.BASES:
            console.print(_claims(base, other, info.machine))
    if out is not None:
        write_whole(out, comparison_json(info, results, disturbed) + "\n")


def _table(found: tuple[comparison.PrecisionResults, ...], price: float) -> Table:
    """Figures downwards, precisions across: 80 columns are few."""
    table = plain_table("")
    table.add_column("")
    for m in found:
        table.add_column(m.precision, justify="right")
    for label, cells in comparison.figure_rows(found, price):
        table.add_row(label, *(text or "unknown" for text in cells))
    return table


def _claims(
    base: comparison.PrecisionResults, other: comparison.PrecisionResults, machine: Machine | None
) -> Table:
    table = plain_table(f"What articles promise, and {other.precision} here")
    for name in ("promise", "measured", "why"):
        table.add_column(name)
    for claim in claims(base, other, machine):
        table.add_row(claim.claim, escape(claim.measured), escape(claim.why))
    return table


@click.command("batch-size")
@click.argument("workload")
@options.size_option("small")
@click.option(
    "--precision",
    default="fp32,bf16",
    show_default=True,
    help=f"Several, separated by commas: {', '.join(PRECISIONS)}.",
)
@click.option(
    "--memory-limit",
    "memory_limit_mib",
    default=0,
    help="MiB that training may take; needed on a CPU.",
)
@click.option("--multiple-of", default=8, show_default=True, help="Sizes that are tried.")
@click.option("--power-of-two", is_flag=True, help="Try powers of two instead.")
@options.seed_option
@options.device_option
@options.time_limit_option(600.0)
@options.json_file_option
@options.store_option
def batch_size(
    workload: str,
    memory_limit_mib: int,
    multiple_of: int,
    power_of_two: bool,
    device: str,
    out: Path | None,
    store: Path,
    **fields: Any,
) -> None:
    """Find the largest batch of WORKLOAD that fits. Each trial is a process of its own, so running
    out of memory harms nothing."""
    if is_script(workload):
        raise BadInput(
            f"{workload} is a script, whose batch cannot be changed from outside. Write a workload "
            "file: a function build(seed) that returns an ampscope.Workload."
        )
    if not memory_limit_mib and not device.startswith("cuda") and not uses_cuda(describe_machine()):
        raise BadInput("On a CPU say how much memory training may take: --memory-limit MIB.")
    if multiple_of < 1:
        raise BadInput("--multiple-of takes a number from 1 on.")
    spec = options.measurement(
        "batch",
        workload,
        device=device,
        memory_limit_mib=memory_limit_mib,
        multiple_of=0 if power_of_two else multiple_of,
        **fields,
    )
    info, results, disturbed = measured(spec, store)
    searches = batches.batches_by_precision(results)
    click.echo(batches.sentence(searches))
    console = Console()
    for search in searches:
        console.print(_batch_table(search))
    if out is not None:
        write_whole(out, batches.searches_json(info, searches, disturbed) + "\n")


def _batch_table(search: batches.BatchSearch) -> Table:
    table = plain_table(f"{search.precision}: {_prediction(search)}")
    for name in ("samples", "fits", "peak memory", "time per step", "samples per second", ""):
        table.add_column(name, justify="left" if not name else "right")
    knee = search.knee
    for made in search.trials:
        peak = made.device_peak or made.peak_bytes
        rate = made.samples_s
        table.add_row(
            f"{made.samples:,}",
            "yes" if made.fits else "no",
            "" if peak is None else binary_size(peak),
            "" if made.step is None else seconds(made.step.median_s),
            "" if rate is None else f"{rate:,.0f}",
            "nine tenths of the best" if made is knee else escape(made.how_it_ended),
        )
    return table


def _prediction(search: batches.BatchSearch) -> str:
    found = search.prediction
    if found is None:
        return "no prediction: this needs two trials that fit, the larger one with more memory"
    return (
        f"predicted {found.largest:,}, from {binary_size(found.fixed_bytes)} and "
        f"{binary_size(found.bytes_per_sample)} per sample under {binary_size(found.limit_bytes)}"
    )
