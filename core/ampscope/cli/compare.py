"""``ampscope compare``: precisions side by side on this machine, the verdict first."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ampscope.cli.options import absolute, store_option
from ampscope.cli.progress import measured
from ampscope.cli.tables import plain_table
from ampscope.compare.comparison import (
    BASES,
    BatchSearch,
    PrecisionResults,
    base_of,
    batches_by_precision,
    by_precision,
    figures,
    searches_json,
    sentence,
)
from ampscope.compare.verdict import claims, comparison_json, verdict
from ampscope.control import BASELINE
from ampscope.errors import BadInput
from ampscope.files import write_whole
from ampscope.hardware.describe import describe_machine, uses_cuda
from ampscope.number_words import binary_size, seconds
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.records import Machine, RunSpec
from ampscope.workloads.catalog import SIZES, is_script


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
@click.option("--seeds", default=3, show_default=True, help="Trainings per precision.")
@click.option("--steps", default=30, show_default=True, help="A seed, fewer where time is short.")
@click.option("--seed", default=0, show_default=True, help="The first one.")
@click.option("--batch", default=0, help="Samples per step; 0: as the workload gives them.")
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
    """Measure WORKLOAD in several precisions, interleaved: step time, memory, energy, loss.

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
        control=BASELINE if script else "",
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


def _table(found: tuple[PrecisionResults, ...], price: float) -> Table:
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


def _claims(base: PrecisionResults, other: PrecisionResults, machine: Machine | None) -> Table:
    table = plain_table(f"What articles promise, and {other.precision} here")
    for name in ("promise", "measured", "why"):
        table.add_column(name)
    for claim in claims(base, other, machine):
        table.add_row(claim.claim, escape(claim.measured), escape(claim.why))
    return table


# ``ampscope batch-size``: the largest batch a precision, predicted and then proved.


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
    searches = batches_by_precision(results)
    click.echo(sentence(searches))
    console = Console()
    for search in searches:
        console.print(_batch_table(search))
    if out is not None:
        write_whole(out, searches_json(info, searches, disturbed) + "\n")


def _batch_table(search: BatchSearch) -> Table:
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


def _prediction(search: BatchSearch) -> str:
    found = search.prediction
    if found is None:
        return "no prediction: this needs two trials that fit, the larger one with more memory"
    return (
        f"predicted {found.largest:,}, from {binary_size(found.fixed_bytes)} and "
        f"{binary_size(found.bytes_per_sample)} a sample under {binary_size(found.limit_bytes)}"
    )
