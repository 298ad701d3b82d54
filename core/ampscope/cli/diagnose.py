"""``ampscope diagnose`` and ``ampscope run``: any training script, untouched."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from ampscope.cli import stopping
from ampscope.cli.options import leave_out_option, store_option
from ampscope.cli.script_checks import INTERVENTIONS, checked_fix, checked_limits, checked_script
from ampscope.cli.verdict import CANCELLED, Output, could_not_run, reason_of, status_of
from ampscope.errors import AmpscopeError, BadInput, Cancelled
from ampscope.experiments.diagnosis import run_diagnosis
from ampscope.experiments.script_runs import ScriptRuns
from ampscope.experiments.validate import check_memory_limit
from ampscope.frameworks.names import TORCH
from ampscope.frameworks.recognise import framework_of
from ampscope.frameworks.settings import parse
from ampscope.observations import Outcome
from ampscope.records import RunSpec, State

EXIT_COULD_NOT_RUN = 2
STEPS = 200  # of a long script; a short one ends by itself, so that its evaluation is seen too
GRACE_S = 12.0
_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def script_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options that both commands take."""
    for option in (
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
        click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m."),
        click.option(
            "--steps",
            type=int,
            help=f"Optimizer steps at most.  [default: {STEPS}, or all of {GRACE_S:.0f} s]",
        ),
        click.option("--time-limit", default=120.0, show_default=True, help="Seconds a run."),
        click.option("--memory-limit", default=0, help="MiB of private memory; 0 is no limit."),
        click.option(
            "--policy",
            type=click.Choice(("native", "cuda")),
            default="native",
            show_default=True,
            help="On a CPU: its own rules, or a rehearsal of CUDA's.",
        ),
        click.option(
            "--framework",
            type=click.Choice(("auto", "torch", "keras", "paddle")),
            default="auto",
            show_default=True,
            help="What the script trains with; auto reads its imports.",
        ),
        click.option("--quiet", is_flag=True, help="Do not show the script's own output."),
        leave_out_option,
        store_option,
    ):
        command = option(command)
    return command


@click.command(context_settings=_SCRIPT)
@click.argument("script")
@click.option(
    "--json", "json_out", type=click.Path(path_type=Path, allow_dash=True),
    help="Write the result here; - is standard output, and what is for people goes elsewhere.",
)  # fmt: skip
@click.option("--no-verify", is_flag=True, help="Name the cause, and do not run its fix.")
@script_options
def diagnose(
    script: str, args: tuple[str, ...], module: bool, steps: int | None, time_limit: float,
    memory_limit: int, policy: str, framework: str, quiet: bool, store: Path,
    json_out: Path | None, no_verify: bool,
) -> None:  # fmt: skip
    """Find out why SCRIPT diverges or does not learn under mixed precision, and prove a fix.

    Exit status: 0 no fault, 1 fault found, 2 could not run or could not tell.
    """
    output = Output(json_out)
    progress = Console(stderr=True)
    show = None if quiet else (lambda text: click.echo(text, nl=False, err=True))
    try:
        spec = _spec(script, args, module, steps, time_limit, memory_limit, policy, framework)
        report = run_diagnosis(
            spec,
            store,
            lambda text: progress.print(f"Running: {text}", markup=False, soft_wrap=True),
            show,
            not no_verify,
        )
    except (Exception, KeyboardInterrupt) as error:  # status 1 would be "fault found"
        reason = reason_of(error)
        stopping.ignore()  # whatever comes now, this is how it ended
        output.write(could_not_run(script, policy, reason))
        raise AmpscopeError(reason) from error
    stopping.ignore()  # the verdict is there
    output.write(report)
    output.show(report)
    sys.exit(status_of(report))


@click.command("run", context_settings=_SCRIPT)
@click.argument("script")
@click.option("--fix", default="as_is", help=f"Interventions, joined with ';': {INTERVENTIONS}.")
@script_options
def run_script(
    script: str, args: tuple[str, ...], module: bool, steps: int | None, time_limit: float,
    memory_limit: int, policy: str, framework: str, quiet: bool, store: Path, fix: str,
) -> None:  # fmt: skip
    """Record SCRIPT, untouched; or with an intervention applied by hand.

    Exit status: the script's own; 2 when it could not be run to its end.
    """
    checked_fix(fix)
    spec = _spec(script, args, module, steps, time_limit, memory_limit, policy, framework)
    if spec.framework != TORCH:
        parse(fix)
    try:
        with ScriptRuns(spec, store) as runs:
            run_id = runs.start(fix, merged=False)
            if quiet:
                result = runs.wait(run_id)
            else:
                result = runs.pass_through(run_id, sys.stdout.buffer, sys.stderr.buffer)
    except KeyboardInterrupt:
        raise Cancelled(CANCELLED) from None
    info, outcome = result.info, _outcome(result.observations)
    done = max(info.steps_done, outcome.attempts)  # a run that was killed may lack its last row
    steps_done = f"{done} optimizer step{'s' if done != 1 else ''}"
    said = [f"Run {info.id}: {info.state}, {steps_done}.", info.message, *outcome.notes]
    click.echo(" ".join(filter(None, said)), err=True)
    ended_by_itself = outcome.ended in ("returned", "exit", "exception", "steps", "time")
    if info.state is State.CANCELLED or not ended_by_itself:
        sys.exit(EXIT_COULD_NOT_RUN)
    sys.exit(outcome.exit_code)


def _check_launcher(script: str, args: tuple[str, ...], module: bool) -> None:
    """Raises BadInput where a launcher has started this command once on each rank: each would
    start the script alone, with the others' environment, and wait for ranks that never come."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" not in os.environ and ("RANK" not in os.environ or ranks == "1"):
        return
    what = shlex.join([*(["-m"] if module else []), script, *args])
    command = click.get_current_context().info_name
    here = os.environ.get("LOCAL_WORLD_SIZE", ranks)
    raise BadInput(
        f"A launcher started `ampscope {command}` on each rank. Start ampscope once, and let it "
        f"start the launcher: ampscope {command} -m torch.distributed.run --nproc-per-node {here} "
        f"{what}"
    )


def _say_whose(args: tuple[str, ...]) -> None:
    """Options behind SCRIPT are the script's, also those that ampscope has too."""
    known = {name for one in click.get_current_context().command.params for name in one.opts}
    ours = [arg for arg in args if arg.startswith("--") and arg.partition("=")[0] in known]
    if ours:
        click.echo(
            f"{', '.join(ours)} goes to the script. What is meant for ampscope stands before it.",
            err=True,
        )


def _outcome(observations: tuple[object, ...]) -> Outcome:
    last = observations[-1] if observations else None
    return last if isinstance(last, Outcome) else Outcome(ended="killed")


def _spec(
    script: str, args: tuple[str, ...], module: bool, steps: int | None, time_limit: float,
    memory_limit: int, policy: str, framework: str,
) -> RunSpec:  # fmt: skip
    """The spec of a script's run. Raises BadInput for what is no Python script."""
    _check_launcher(script, args, module)
    checked_limits(STEPS if steps is None else steps, time_limit, memory_limit)
    _say_whose(args)
    workload = f"-m {script}" if module else checked_script(script)
    if framework == "auto":
        framework = TORCH if module else framework_of(Path(workload))
    check_memory_limit(framework, memory_limit)
    return RunSpec(
        workload=workload,
        framework=framework,
        kind="script",
        steps=STEPS if steps is None else steps,
        grace_s=GRACE_S if steps is None else 0.0,
        policy=policy,
        time_limit_s=time_limit,
        memory_limit_mib=memory_limit,
        args=args,
        label=Path(script).name,
        precision="as_is",
        group=secrets.token_hex(4),
    )
