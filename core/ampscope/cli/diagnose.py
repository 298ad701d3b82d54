"""``ampscope diagnose`` and ``ampscope run``: any training script, untouched."""

from __future__ import annotations

import ast
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.experiments.diagnosis import run_diagnosis
from ampscope.experiments.script_runs import ScriptRuns
from ampscope.records import RunSpec, State
from ampscope.report.contract import to_json
from ampscope.report.terminal import print_report

EXIT_NO_FAULT, EXIT_FAULT, EXIT_COULD_NOT_RUN = 0, 1, 2
_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def script_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options that both commands take."""
    for option in (
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
        click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m."),
        click.option("--steps", default=200, show_default=True, help="Optimizer steps at most."),
        click.option("--time-limit", default=120.0, show_default=True, help="Seconds a run."),
        click.option("--memory-limit", default=0, help="MiB of private memory; 0 is no limit."),
        click.option(
            "--policy",
            type=click.Choice(("native", "cuda")),
            default="native",
            show_default=True,
            help="On a CPU: its own rules, or a rehearsal of CUDA's.",
        ),
        click.option("--quiet", is_flag=True, help="Do not show the script's own output."),
        store_option,
    ):
        command = option(command)
    return command


@click.command(context_settings=_SCRIPT)
@click.argument("script")
@click.option("--json", "json_out", type=click.Path(path_type=Path), help="Write the result here.")
@click.option("--no-verify", is_flag=True, help="Name the cause, and do not run its fix.")
@script_options
def diagnose(
    script: str, args: tuple[str, ...], module: bool, steps: int, time_limit: float,
    memory_limit: int, policy: str, quiet: bool, store: Path, json_out: Path | None,
    no_verify: bool,
) -> None:  # fmt: skip
    """Find out why SCRIPT diverges or does not learn under mixed precision, and prove a fix.

    Exit status: 0 no fault, 1 fault found, 2 could not run.
    """
    spec = _spec(script, args, module, steps, time_limit, memory_limit, policy)
    console = Console(stderr=True)
    show = None if quiet else (lambda text: click.echo(text, nl=False, err=True))
    report = run_diagnosis(
        spec,
        store,
        lambda text: console.print(f"Running: {text}", markup=False),
        show,
        not no_verify,
    )
    if json_out is not None:
        try:
            json_out.write_text(to_json(report))
        except OSError as error:
            raise BadInput(f"Cannot write {json_out}: {error.strerror}.") from error
    print_report(report, Console())
    if report.could_not_run:
        sys.exit(EXIT_COULD_NOT_RUN)
    sys.exit(EXIT_FAULT if report.diagnosis.findings else EXIT_NO_FAULT)


@click.command("run", context_settings=_SCRIPT)
@click.argument("script")
@click.option("--fix", default="as_is", help="An intervention, such as fp32_modules:encoder.0.")
@script_options
def run_script(
    script: str, args: tuple[str, ...], module: bool, steps: int, time_limit: float,
    memory_limit: int, policy: str, quiet: bool, store: Path, fix: str,
) -> None:  # fmt: skip
    """Record SCRIPT, untouched; or with an intervention applied by hand."""
    spec = _spec(script, args, module, steps, time_limit, memory_limit, policy)
    show = None if quiet else (lambda text: click.echo(text, nl=False))
    with ScriptRuns(spec, store) as runs:
        result = runs.wait(runs.start(fix), show)
    info = result.info
    click.echo(
        f"Run {info.id}: {info.state}, {info.steps_done} optimizer steps. {info.message}", err=True
    )
    if info.state is not State.FINISHED:
        sys.exit(EXIT_COULD_NOT_RUN)
    outcome = result.observations[-1]
    sys.exit(getattr(outcome, "exit_code", 0))


def _spec(
    script: str, args: tuple[str, ...], module: bool, steps: int, time_limit: float,
    memory_limit: int, policy: str,
) -> RunSpec:  # fmt: skip
    """The spec of a script's run. Raises BadInput for what is no Python script."""
    if steps < 1 or time_limit <= 0 or memory_limit < 0:
        raise BadInput("Steps and the time limit must be positive, the memory limit 0 or more.")
    workload = f"-m {script}" if module else _checked_script(script)
    return RunSpec(
        workload=workload,
        kind="script",
        steps=steps,
        policy=policy,
        time_limit_s=time_limit,
        memory_limit_mib=memory_limit,
        args=args,
        label=Path(script).name,
        precision="as_is",
        group=secrets.token_hex(4),
    )


def _checked_script(script: str) -> str:
    path = Path(script)
    if not path.exists():
        raise BadInput(f"There is no file {script}.")
    if not path.is_file():
        raise BadInput(f"{script} is not a file.")
    try:
        ast.parse(path.read_bytes(), filename=script)
    except SyntaxError as error:
        raise BadInput(f"{script} is not Python: {error.msg} at line {error.lineno}.") from error
    except ValueError as error:
        raise BadInput(f"{script} is not Python: {error}.") from error
    return str(path.absolute())
