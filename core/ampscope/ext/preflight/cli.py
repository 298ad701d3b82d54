"""``ampscope preflight``: what can be known of a training script before it runs."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from ampscope.cli.diagnose import checked_limits, checked_script
from ampscope.cli.options import own_table
from ampscope.cli.progress import say_unused_gpu
from ampscope.diagnosis import findings as diagnosis
from ampscope.errors import BadInput
from ampscope.ext.preflight.checks import (
    Result,
    Settings,
    check_paths,
    difference,
    repaired,
    settings_of,
    write_repaired,
)
from ampscope.ext.preflight.codes import code_of_cause
from ampscope.ext.preflight.finding import SourceFinding
from ampscope.ext.preflight.formats import FORMATS, written
from ampscope.files import write_whole
from ampscope.launcher.plan import run_diagnosis
from ampscope.pythons import framework_of
from ampscope.records import RunSpec
from ampscope.story.document import visible

EXIT_NOTHING, EXIT_FINDINGS = 0, 1
MOST_STEPS = 50  # of --steps; for more there is ampscope diagnose


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, readable=False))
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="How findings are written.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write there, not to standard output.")
@click.option("--diff", "show_diff", is_flag=True, help="Show the safe repairs, change nothing.")
@click.option("--fix", is_flag=True, help="Write the safe repairs; what is left is reported.")
@click.option(
    "--steps",
    type=click.IntRange(1, MOST_STEPS),
    metavar="N",
    help="Also run each PATH for N optimizer steps, beside an fp32 control, and report what goes "
    "wrong there. The script is executed; its files stay as they are.",
)
@click.option("--time-limit", default=60.0, show_default=True, help="Seconds per run of --steps.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="A pyproject.toml.  [default: the nearest above the first path]",
)
def preflight(
    paths: tuple[Path, ...], form: str, out: Path | None, show_diff: bool, fix: bool,
    steps: int | None, time_limit: float, config: Path | None,
) -> None:  # fmt: skip
    """Check training scripts, or all below folders, without running them.

    Exit status: 0 nothing found, 1 findings, 2 bad input.
    """
    settings = settings_for(paths[0], config)
    if steps is not None:
        checked_limits(steps, time_limit, 0)
        for path in paths:
            if os.path.isdir(path):
                raise BadInput(f"{path} is a folder: --steps runs scripts, so name the script.")
            checked_script(str(path))
    result = check_paths(paths, settings)
    if show_diff or fix:
        written_files = 0
        for source in list(result.sources.values()):
            found = [f for f in result.findings if f.path == source.path]
            changed = repaired(source, found)
            if changed == source.text:
                continue
            if show_diff:
                click.echo(_harmless(difference(source, changed)), nl=False)
            if fix:
                write_repaired(source, changed)
                written_files += 1
        if show_diff and not fix:
            sys.exit(EXIT_FINDINGS if result.findings else EXIT_NOTHING)
        if fix:
            files = f"{written_files} file{'s' if written_files != 1 else ''}"
            click.echo(f"Repairs written into {files}.", err=True)
        result = check_paths(paths, settings)
    not_run = _run_steps(paths, steps, time_limit, settings, result) if steps is not None else []
    for sentence in result.unread:
        click.echo(f"Left out: {visible(sentence)}", err=True)
    _write(written(result, form), form, out)
    if not_run:
        raise BadInput(" ".join(not_run))
    sys.exit(EXIT_FINDINGS if result.findings else EXIT_NOTHING)


def _run_steps(
    paths: Sequence[Path], steps: int, time_limit_s: float, settings: Settings, result: Result
) -> list[str]:
    """Run each script and add what it shows to the result; a sentence for each that could not be
    run. A place that the source showed already is not reported twice."""
    failed = []
    say_unused_gpu()
    with tempfile.TemporaryDirectory(prefix="ampscope-steps-") as folder:
        for path in paths:
            spec = RunSpec(
                workload=str(path.absolute()), framework=framework_of(path), kind="script",
                steps=steps, policy="auto", time_limit_s=time_limit_s, label=path.name,
                precision="as_is", group=secrets.token_hex(4),
            )  # fmt: skip
            click.echo(f"Running {steps} steps: {visible(str(path))}", err=True)
            report = run_diagnosis(spec, Path(folder, "runs.db"), verify=False)
            if report.could_not_run:
                failed.append(f"{path} could not be run: {report.could_not_run}")
                continue
            if report.undecided:
                result.unread.append(f"{path}, {steps} steps: {report.undecided}")
            known = {(f.path, f.code.code, f.line) for f in result.findings}
            for found, level in (
                *((f, "error") for f in report.diagnosis.findings),
                *((f, "warning") for f in report.diagnosis.latent),
            ):
                finding = _finding(found, level, path)
                source = result.sources[str(path)]
                ignored = finding.path == source.path and source.is_ignored(
                    finding.code.code, finding.line, finding.line
                )
                seen = (finding.path, finding.code.code, finding.line) in known
                if settings.wants(finding.code) and not ignored and not seen:
                    result.findings.append(finding)
    result.findings.sort(key=lambda f: (f.path, f.line, f.column, f.code.code))
    return failed


def _finding(found: diagnosis.Finding, level: str, script: Path) -> SourceFinding:
    """A cause that a run showed, at its line; a line is named from the script's folder."""
    file, _, number = found.verdict.line.rpartition(":")
    has_line = bool(file) and number.isdecimal()
    path = str(script.parent / file) if has_line else str(script)
    line = int(number) if has_line else 0
    return SourceFinding(
        code_of_cause(found.cause, level), path, line, 0, line, 0, found.verdict.reason
    )


def _write(text: str, form: str, out: Path | None) -> None:
    if out is None:
        click.echo(_harmless(text) if form == "text" else text)
        return
    try:
        write_whole(out, text + "\n")
    except OSError as error:
        raise BadInput(f"Cannot write {out}: {error.strerror}.") from error


def _harmless(text: str) -> str:
    """Lines of a file, without what would act on a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def settings_for(
    first: Path, config: Path | None = None, may_read: Callable[[Path], bool] = os.path.isfile
) -> Settings:
    """``[tool.ampscope.preflight]`` of the named file, or of the nearest above ``first`` that may
    be read."""
    if config is None:
        start = first.absolute()
        folders = [start, *start.parents] if os.path.isdir(first) else list(start.parents)
        files = (folder / "pyproject.toml" for folder in folders)
        config = next(
            (file for file in files if may_read(file) and os.path.isfile(file)), None
        )  # never raises
        if config is None:
            return Settings()
    return settings_of(own_table(config, "preflight"), str(config))
