"""``ampscope check``: whether checkpoints are poisoned, without loading them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ampscope.errors import BadInput
from ampscope.ext.checkpoints.check import CheckResult, check_checkpoint
from ampscope.ext.checkpoints.files import checkpoints_in
from ampscope.ext.checkpoints.torch_files import TorchFiles
from ampscope.story.document import line

EXIT_CLEAN, EXIT_FINDINGS, EXIT_UNREADABLE = 0, 1, 2
MOST_SHOWN = 20  # findings and notes of one checkpoint; --json has all


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, readable=False))
@click.option("--json", "as_json", is_flag=True, help="Everything that was counted, as JSON.")
@click.option(
    "--for",
    "loaded_as",
    type=click.Choice(("fp16",)),
    help="It is going to be loaded in fp16: weights that overflow there are findings.",
)
def check(paths: tuple[Path, ...], as_json: bool, loaded_as: str | None) -> None:
    """Look at every number of checkpoints: NaN, infinities, dtypes, averages, optimizer state.

    A PATH is a safetensors file, a file of torch.save (opened with weights_only=True alone), a
    *.index.json of shards, or a folder of these, with the folders below. Exit status:
    0 clean, 1 findings, 2 cannot read.
    """
    results: list[CheckResult] = []
    problems: list[str] = []
    with TorchFiles() as torch_files:
        for path in (found for named in paths for found in checkpoints_in(named)):
            try:
                results.append(check_checkpoint(path, loaded_as or "", torch_files))
                problems += results[-1].unreadable
            except BadInput as error:
                problems.append(str(error))
    for problem in problems:
        click.echo(f"ampscope: {line(problem, 1000)}", err=True)
    if as_json:
        made = {"checkpoints": [r.as_json() for r in results], "unreadable": problems}
        click.echo(json.dumps(made))
    else:
        for result in results:
            click.echo("\n".join(line(text, 1000) for text in _lines(result)))
    if problems:
        sys.exit(EXIT_UNREADABLE)
    sys.exit(EXIT_FINDINGS if any(r.findings for r in results) else EXIT_CLEAN)


def _lines(result: CheckResult) -> list[str]:
    """What a person reads."""
    nothing = "clean"
    if result.unreadable or result.left_out:
        nothing = "nothing found in what was looked at"
    state = _many(len(result.findings), "finding") if result.findings else nothing
    size = sum(t.size for t in result.tensors)
    found = [
        f"{result.path}: {state}; {_many(len(result.tensors), 'tensor')}, {size / 2**20:,.1f} MiB"
    ]
    found += [
        f"dtype {r.kind} {r.dtype}: {_many(r.tensors, 'tensor')}, {_many(r.elements, 'element')}"
        for r in result.dtypes()
    ]
    found += _shortened([f"{f.code}: {f.text}" for f in result.findings])
    away = [a for a in result.averages if a.relative_distance is not None]
    if away:
        last = max(away, key=lambda a: a.relative_distance or 0.0)
        found.append(
            f"{len(away):,} averages beside their weights; farthest is {last.name}, by "
            f"{last.relative_distance:.2%} of its weight's norm."
        )
    found += _shortened([f"note: {text}" for text in result.notes])
    return found + [f"left out: {text}" for text in result.left_out]


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' if count != 1 else ''}"


def _shortened(texts: list[str]) -> list[str]:
    more = len(texts) - MOST_SHOWN
    return texts if more <= 0 else [*texts[:MOST_SHOWN], f"and {more:,} more (--json has all)"]
