"""``ampscope hardware``: what this machine is, and what AMP can and cannot give on it.

With ``--bench`` it is measured: products in every dtype, copies, and what a crooked size costs.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from ampscope.cli.bench_table import bench_table
from ampscope.cli.measuring import measured
from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.hardware.bench_json import bench_json
from ampscope.hardware.bench_view import bench_view
from ampscope.hardware.describe import HardwareReport, describe_machine, report_json, sentence
from ampscope.records import RunSpec
from ampscope.store.reader import Reader


@click.command()
@click.option("--bench", is_flag=True, help="Measure what it reaches (half a minute).")
@click.option("--quick", is_flag=True, help="Measure fewer sizes, in a third of the time.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@store_option
def hardware(bench: bool, quick: bool, device: str, as_json: bool, store: Path) -> None:
    """Say what this machine can do for mixed precision."""
    if not bench and (quick or device != "auto"):
        raise BadInput("--quick and --device belong to a measurement: add --bench.")
    report = describe_machine()
    if bench:
        _bench(report, device, quick, as_json, store)
    else:
        click.echo(report_json(report) if as_json else sentence(report))


def _bench(report: HardwareReport, device: str, quick: bool, as_json: bool, store: Path) -> None:
    args = ("quick",) if quick else ()
    spec = RunSpec(workload="", kind="bench", device=device, args=args)
    run, results, _ = measured(spec, store)
    with Reader(store) as reader:
        view = bench_view(run, results, reader.samples(run.id), report)
    if as_json:
        data = {**json.loads(report_json(report)), "bench": bench_json(run, results, view)}
        click.echo(json.dumps(data, indent=1, ensure_ascii=False))
        return
    click.echo(sentence(report))
    click.echo()
    Console().print(bench_table(run, view))
    texts = (view.sentence, *view.warnings, view.alignment_sentence, view.vendor_sentence)
    click.echo("\n".join(text for text in texts if text))
