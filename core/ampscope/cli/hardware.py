"""``ampscope hardware``: what this machine is, and what AMP can and cannot give on it.

With ``--bench`` it is measured: matmuls in every dtype, copies, and what a misaligned size costs.
``ampscope tensor-cores`` says which matmuls of a training step use Tensor Cores.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ampscope.analysis import tensor_core_use
from ampscope.analysis.bench import bench_json, bench_view
from ampscope.cli import options
from ampscope.cli.progress import measured
from ampscope.cli.tables import MISSING, bench_table, plain_table
from ampscope.errors import BadInput
from ampscope.files import write_whole
from ampscope.hardware.capability import Fit
from ampscope.hardware.describe import HardwareReport, describe_machine, report_json, sentence
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.record_json import dumps
from ampscope.records import RunSpec
from ampscope.store.reader import Reader

SHOWN = 24  # matmuls; --all shows the rest
LAYER_LENGTH = 16
FITS = {Fit.ELIGIBLE: "yes", Fit.REDUCED: "less", Fit.NOT: "no", Fit.UNKNOWN: "?"}
USED = {
    tensor_core_use.CoreVerdict.USED: "yes",
    tensor_core_use.CoreVerdict.NOT_USED: "no",
    tensor_core_use.CoreVerdict.UNKNOWN: "unknown",
}
_PHASES = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}


@click.command()
@click.option("--bench", is_flag=True, help="Measure what it reaches (half a minute).")
@click.option("--quick", is_flag=True, help="Measure fewer sizes, in a third of the time.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@options.store_option
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
        click.echo(dumps(data, indent=1, ensure_ascii=False))
        return
    click.echo(sentence(report))
    click.echo()
    Console().print(bench_table(run, view))
    texts = (view.sentence, *view.warnings, view.alignment_sentence, view.vendor_sentence)
    click.echo("\n".join(text for text in texts if text))


@click.command("tensor-cores")
@click.argument("workload")
@click.argument("args", nargs=-1)
@options.size_option("small")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), default="fp16", show_default=True)
@options.seed_option
@options.device_option
@options.time_limit_option(600.0)
@click.option("--all", "is_whole", is_flag=True, help=f"All matmuls, not the {SHOWN} largest.")
@options.json_file_option
@options.store_option
def cores(
    workload: str,
    args: tuple[str, ...],
    is_whole: bool,
    out: Path | None,
    store: Path,
    **fields: Any,
) -> None:
    """Say which matmuls of one training step of WORKLOAD use Tensor Cores.

    WORKLOAD is a built-in model, path/to/file.py:build, package.module:build, or any training
    script, run untouched with ARGS and in its own size and precision. On a CPU its instructions
    for half matmuls take the place of Tensor Cores.
    """
    spec = options.measurement("cores", workload, args, steps=1, **fields)
    info, results, _ = measured(spec, store)
    use = tensor_core_use.core_use(results, info.machine)
    if use is None:  # a finished run has recorded its step
        raise click.ClickException(f"Run {info.id} holds no step.")
    click.echo(tensor_core_use.answer(use))
    if use.step.device == "cpu":
        click.echo(tensor_core_use.ON_A_CPU)
    console = Console()
    console.print(_matmuls(use, len(use.uses) if is_whole else SHOWN))
    gains = tensor_core_use.padding_gains([one.matmul for one in use.uses])
    if gains:
        console.print(_padding(gains))
    if out is not None:
        write_whole(out, tensor_core_use.cores_json(info, use) + "\n")


def _matmuls(use: tensor_core_use.CoreUse, shown: int) -> Table:
    """Equal matmuls are one line; the layer is the first that has it. 80 columns are few: a dtype
    that all share stands in the title, and the unit of the rates in the heading."""
    listed = use.uses[:shown]
    dtypes = {one.matmul.dtype for one in listed}
    unit = _unit(listed)
    table = plain_table(f"Matmuls of one step{', in ' + dtypes.pop() if len(dtypes) == 1 else ''}")
    left_out = len(use.uses) - len(listed)
    if left_out:
        table.caption = f"{left_out} smaller ones are left out; --all shows them."
        table.caption_justify = "left"
    for name in ("layer", "", "matmul", *(["dtype"] if dtypes else [])):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "FLOPs", unit.name, "×fp32"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("fits", "used"):
        table.add_column(name, no_wrap=True)
    for one in listed:
        first, *rest = _cells(one, use.step.flops, unit)
        table.add_row(*_place(one), first, *([one.matmul.dtype] if dtypes else []), *rest)
    return table


@dataclass(frozen=True, slots=True)
class _Unit:
    name: str
    flops_s: float


def _unit(listed: Sequence[tensor_core_use.MatmulUse]) -> _Unit:
    fastest = max((one.matmul.flops_s or 0.0 for one in listed), default=0.0)
    return _Unit("TFLOP/s", 1e12) if fastest >= 1e12 else _Unit("GFLOP/s", 1e9)


def _place(one: tensor_core_use.MatmulUse) -> tuple[str, str]:
    first, *others = one.matmul.places
    more = f" +{len(others)}" if others else ""
    name = _end(first.module or "(model)", LAYER_LENGTH - len(more)) + more
    return escape(name), _PHASES.get(first.phase, first.phase)


def _cells(one: tensor_core_use.MatmulUse, total: int, unit: _Unit) -> tuple[str, ...]:
    """From the matmul to the verdict."""
    matmul = one.matmul
    sizes = "×".join(str(d.size) for d in matmul.dimensions)
    kind = "conv " if "conv" in matmul.op else "attn " if "attention" in matmul.op else ""
    reached, faster = matmul.flops_s, one.rate.speedup
    return (
        kind + sizes,
        str(matmul.count),
        f"{one.step_flops / total:.1%}" if total else MISSING,
        f"{reached / unit.flops_s:.3g}" if reached else MISSING,
        f"{faster:.2f}" if faster else MISSING,
        FITS[one.eligibility.fit],
        USED[one.verdict],
    )


def _padding(gains: list[tensor_core_use.PaddingGain]) -> Table:
    table = plain_table("Layers that miss by a dimension: the padded matmuls, measured")
    for name in ("layer", "padding"):
        table.add_column(name, no_wrap=True)
    for name in ("a step", "padded", "gain", "quartiles"):
        table.add_column(name, justify="right", no_wrap=True)
    for gain in gains[:SHOWN]:
        table.add_row(
            escape(_end(gain.module or "(model)", LAYER_LENGTH)),
            ", ".join(f"{size} to {padded}" for size, padded in gain.changes),
            f"{1e3 * gain.seconds:.2f} ms",
            f"{1e3 * gain.padded_s:.2f} ms",
            f"{gain.gain:.2f}×",
            f"{gain.low:.2f} to {gain.high:.2f}",
        )
    return table


def _end(name: str, length: int) -> str:
    """The end of the path distinguishes layers."""
    return name if len(name) <= length else f"…{name[1 - length :]}"
