"""``ampscope diagnose`` and ``ampscope run``: any training script, untouched; and ``ampscope
replay``: a failing step of a watched training.

A diagnosis goes to people as a report, to programs as JSON (:class:`Output`), and to CI as an exit
status (:func:`status_of`).
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import secrets
import shlex
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ampscope import extensions
from ampscope.cli import stopping
from ampscope.cli.options import leave_out_option, memory_limit_option, store_option
from ampscope.cli.progress import say_unused_gpu
from ampscope.control import BASELINE, INTERVENTIONS, Control
from ampscope.diagnosis.findings import Diagnosis
from ampscope.diagnosis.load import judge_again
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.errors import AmpscopeError, BadInput, Cancelled
from ampscope.files import LARGEST_SOURCE, write_whole
from ampscope.launcher.children import child_environment, ends_with_us, started
from ampscope.launcher.launch import check_memory_limit
from ampscope.launcher.plan import run_diagnosis
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import Outcome
from ampscope.policy.device_profiles import PROFILES, USUAL
from ampscope.pythons import TORCH, check_control, framework_of
from ampscope.records import AUTO, RunSpec, State
from ampscope.render.contract import to_json
from ampscope.render.terminal import print_line, print_sections
from ampscope.story import fix_words
from ampscope.story.diagnosis import cause_so_far, summary
from ampscope.story.document import visible

EXIT_COULD_NOT_RUN = 2
STEPS = 200  # of a long script; a short one ends by itself, so that its evaluation is seen too
GRACE_S = 12.0
_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
CAPTURED_STEP = "-m ampscope.watcher.captured_step"
EXIT_NO_FAULT, EXIT_FAULT, EXIT_UNDECIDED = 0, 1, 2
STANDARD_OUTPUT = Path("-")
CANCELLED = "Cancelled. What was recorded is kept."
TIME_IS_UP = "The time of --time is up. What was recorded is kept."
PIPE_WIDTH = 120  # columns where no terminal sets them


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """What both commands are told of a script: which it is, and how it is run. A field is a name of
    click's."""

    script: str
    args: tuple[str, ...]
    module: bool
    steps: int | None  # None: the usual number, from the first in half precision
    skip_to: int
    time_limit: float  # seconds of each run
    memory_limit: int  # MiB
    policy: str
    rehearsed: str
    framework: str
    quiet: bool
    store: Path


def script_options(body: Callable[..., None]) -> Callable[..., None]:
    """Options that both commands take, for ``body`` as one argument."""

    @functools.wraps(body)
    def command(**values: Any) -> None:
        own = {name: values.pop(name) for name in ScriptOptions.__dataclass_fields__}
        body(ScriptOptions(**own), **values)

    for option in (
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
        click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m."),
        click.option(
            "--steps",
            type=int,
            help=f"Optimizer steps at most, from the first.  [default: {STEPS} from the first in "
            f"half precision, or all of {GRACE_S:.0f} s]",
        ),
        click.option(
            "--skip-to",
            default=0,
            metavar="STEP",
            help="Let so many optimizer steps pass unrecorded, at the script's own speed; record "
            "from there on.",
        ),
        click.option("--time-limit", default=120.0, show_default=True, help="Seconds per run."),
        memory_limit_option,
        click.option(
            "--policy",
            type=click.Choice(("auto", "native", "cuda")),
            default="auto",
            show_default=True,
            help="On a CPU: its own rules, or CUDA's with a device that is rehearsed; with auto, "
            "diagnose rehearses what needs CUDA.",
        ),
        click.option(
            "--as",
            "rehearsed",
            type=click.Choice(sorted(PROFILES)),
            default=USUAL,
            show_default=True,
            help="The device that a rehearsal stands in for.",
        ),
        click.option(
            "--framework",
            type=click.Choice(("auto", TORCH, *extensions.frameworks())),
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


def _job_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--on``, where an extension has engines."""
    if not extensions.job_engines():
        return command
    return click.option(
        "--on",
        type=click.Choice(tuple(extensions.job_engines())),
        help="Run the baseline, the controls and the fixes side by side as jobs: of Slurm or of "
        "this machine through submitit, or of a Ray cluster.",
    )(command)


def _document_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--sarif FILE`` and what else extensions write of a diagnosis."""
    for word in extensions.documents():
        option = click.option(
            f"--{word}",
            type=click.Path(path_type=Path),
            help=f"Write the findings there as {word.upper()}, for other programs.",
        )
        command = option(command)
    return command


@click.command(context_settings=_SCRIPT)
@click.argument("script", required=False, default="")
@click.option(
    "--capsule",
    type=click.Path(path_type=Path),
    help="Instead of SCRIPT: judge the failing step that a watched training has kept.",
)
@click.option(
    "--trust",
    default="",
    metavar="FILE.py:build",
    help="With --capsule: import this file of yours, whose function returns the model.",
)
@_job_options
@click.option(
    "--json",
    "json_out",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write the result here; - is standard output, and what is for people goes elsewhere.",
)
@_document_options
@click.option("--no-verify", is_flag=True, help="Name the cause, and do not run its fix.")
@click.option(
    "--again", is_flag=True, help="SCRIPT is a run: judge its evidence by the rules of today."
)
@click.option(
    "--time",
    "time_s",
    type=float,
    default=math.inf,
    metavar="SECONDS",
    help="For all runs together: end with the verdict so far when they have passed.",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="Let the runs write your own files, where they cannot have copies or need the real ones.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 for latent losses of numbers, too.")
@script_options
def diagnose(
    asked: ScriptOptions, json_out: Path | None, no_verify: bool, again: bool, strict: bool,
    capsule: Path | None, trust: str, time_s: float, in_place: bool, on: str | None = None,
    **documents: Path | None,
) -> None:  # fmt: skip
    """Find out why SCRIPT diverges or does not learn under mixed precision, and prove a fix.

    The cause is printed as soon as it is known. Ctrl-C then ends with it, without further fixes.

    Exit status: 0 no fault, 1 fault found, 2 could not run or undetermined.
    """
    output = Output(json_out, documents)
    progress = Console(stderr=True)
    show = None if asked.quiet else (lambda text: click.echo(text, nl=False, err=True))
    so_far: list[DiagnosisResult] = []

    def hear(report: DiagnosisResult) -> None:
        before = [f.cause for one in so_far for f in one.diagnosis.findings[:1]]
        if [f.cause for f in report.diagnosis.findings[:1]] not in ([], before):
            print_line(cause_so_far(report), progress)
        so_far[:] = [report]

    try:
        if not time_s > 0:
            raise BadInput("--time takes a positive number of seconds.")
        if capsule is None and not asked.script:
            raise BadInput("Name the script to diagnose, or a step with --capsule.")
        if trust and capsule is None:
            raise BadInput("--trust goes with --capsule. A script is run unchanged.")
        if in_place and (on or again):
            raise BadInput("--in-place is for runs of this machine: leave --on and --again out.")
        if again and asked.args:
            raise BadInput(f"--again takes a run alone: put {shlex.join(asked.args)} before it.")
        if again:  # the conclusion of today's rules takes the old one's place
            before, report = judge_again(asked.store, asked.script)
            click.echo(fix_words.change(before, report), err=True)
        else:
            spec = _spec(asked) if capsule is None else captured_spec(capsule, trust, asked)
            if not on and spec.framework == TORCH:  # jobs run on other machines
                say_unused_gpu()
            with stopping.within(time_s):
                report = run_diagnosis(
                    spec,
                    asked.store,
                    lambda text: progress.print(f"Running: {text}", markup=False, soft_wrap=True),
                    show,
                    not no_verify,
                    on or "",
                    hear,
                    in_place,
                )
    except (Exception, KeyboardInterrupt) as error:  # status 1 would be "fault found"
        reason = reason_of(error)
        stopping.ignore()  # whatever comes now, this is how it ended
        if not so_far:
            output.write(could_not_run(asked.script or str(capsule or ""), asked.policy, reason))
            raise AmpscopeError(reason) from error
        click.echo(f"ampscope: {visible(reason)}", err=True)
        (report,) = so_far
    stopping.ignore()  # the verdict is there
    output.write(report)
    output.show(report)
    sys.exit(status_of(report, strict=strict))


@click.command("run", context_settings=_SCRIPT)
@click.argument("script")
@click.option("--fix", default=BASELINE, help=f"Interventions, joined with ';': {INTERVENTIONS}.")
@script_options
def run_script(asked: ScriptOptions, fix: str) -> None:
    """Record SCRIPT, untouched; or with an intervention applied by hand.

    Exit status: the script's own; 2 when it could not be run to its end.
    """
    Control(fix).check()
    spec = _spec(asked)
    check_control(spec.framework, fix)
    if spec.framework == TORCH:
        say_unused_gpu()
    if spec.policy == AUTO:  # nothing is run a second time here, so the first runs to its end
        spec = replace(spec, policy="native")
    try:
        with ScriptRuns(spec, asked.store) as runs:
            run_id = runs.start(fix, merged=False)
            if asked.quiet:
                result = runs.wait(run_id)
            else:
                result = runs.pass_through(run_id, sys.stdout.buffer, sys.stderr.buffer)
    except KeyboardInterrupt:
        raise Cancelled(CANCELLED) from None
    info, seen = result.info, (o for o in result.observations if isinstance(o, Outcome))
    outcome = next(seen, Outcome(ended="killed"))
    done = max(info.steps_done, outcome.steps)  # a run that was killed may lack its last row
    steps_done = f"{done} optimizer step{'s' if done != 1 else ''}"
    said = [f"Run {info.id}: {info.state}, {steps_done}.", info.message, *outcome.notes]
    click.echo(" ".join(filter(None, said)), err=True)
    ended_by_itself = outcome.ended in ("returned", "exit", "exception", "steps", "time")
    if info.state is State.CANCELLED or not ended_by_itself:
        sys.exit(EXIT_COULD_NOT_RUN)
    sys.exit(outcome.exit_code)


@click.command()
@click.argument("capsule", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="file.py:build, a function that returns the model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(capsule: Path, model: str, as_json: bool) -> None:
    """Run a CAPSULE's forward and backward again, beside fp32, and name the first bad op.

    Exit status 1 when something was not finite, 0 when all was finite, 2 when it could not be run.
    """
    command = [*started("ampscope.watcher.replay_child"), str(capsule)]
    command += ["--model", model, *(["--json"] if as_json else [])]
    # In a session of its own: a signal to this command ends it once, from here.
    done = subprocess.run(
        command, env=ends_with_us(child_environment()), check=False, start_new_session=True
    )
    sys.exit(done.returncode)


def _spec(asked: ScriptOptions) -> RunSpec:
    """The spec of a script's run. Raises BadInput for what is no Python script."""
    script, args, module = _without_launcher(asked.script, asked.args, asked.module)
    _check_launcher(script, args, module)
    steps, skip_to = STEPS if asked.steps is None else asked.steps, asked.skip_to
    checked_limits(steps, asked.time_limit, asked.memory_limit)
    _say_whose(args)
    workload = f"-m {script}" if module else checked_script(script, ", or use -m for a package")
    framework, policy = asked.framework, asked.policy
    if framework == "auto":
        framework = TORCH if module else framework_of(Path(workload))
    check_memory_limit(framework, asked.memory_limit)
    if skip_to < 0 or (skip_to and framework != TORCH):
        raise BadInput("--skip-to takes a number of optimizer steps, of a PyTorch script alone.")
    return RunSpec(
        workload=workload,
        framework=framework,
        kind="script",
        steps=steps,
        skip_to=skip_to,
        grace_s=GRACE_S if asked.steps is None else 0.0,
        policy="native" if policy == "auto" and framework != TORCH else policy,
        rehearsed=asked.rehearsed,
        time_limit_s=asked.time_limit,
        memory_limit_mib=asked.memory_limit,
        args=args,
        label=Path(script).name,
        precision="as_is",
        group=secrets.token_hex(4),
    )


# Commands that start a training script, and the module that each of them is.
_LAUNCHERS = {
    ("torchrun",): "torch.distributed.run",
    ("accelerate", "launch"): "accelerate.commands.launch",
    ("deepspeed",): "deepspeed.launcher.runner",
}


def _without_launcher(
    script: str, args: tuple[str, ...], module: bool
) -> tuple[str, tuple[str, ...], bool]:
    """What the user's own command line runs: ``torchrun … train.py`` is a module with arguments,
    ``python train.py`` a script."""
    if module or os.path.isfile(script):
        return script, args, module
    words = (Path(script).name, *args)
    for launcher, name in _LAUNCHERS.items():
        if words[: len(launcher)] == launcher:
            return name, words[len(launcher) :], True
    if re.fullmatch(r"python[\d.]*", words[0]) and len(words) > 1:
        if words[1] == "-m" and len(words) > 2:
            return words[2], words[3:], True
        if not words[1].startswith("-"):
            return words[1], words[2:], False
    return script, args, module


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


def checked_limits(steps: int, time_limit_s: float, memory_limit_mib: int) -> None:
    """Raises BadInput for limits under which nothing can run."""
    if steps < 1 or not (math.isfinite(time_limit_s) and time_limit_s > 0) or memory_limit_mib < 0:
        raise BadInput("Steps and the time limit must be positive, the memory limit 0 or more.")


def checked_script(script: str, instead: str = "") -> str:
    """The script's absolute path. Raises BadInput with what is wrong with it; ``instead`` is what
    the command takes in place of a folder's script, as in " or use -m"."""
    path = Path(script)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        if script.startswith("-"):  # what is unknown is taken for the script's own
            raise BadInput(
                f"There is no option {script}. --help lists those that there are."
            ) from error
        raise BadInput(f"There is no file {script}.") from error
    except OSError as error:
        raise BadInput(f"Cannot read {script}: {error.strerror}.") from error
    if path.is_dir():
        raise BadInput(f"{script} is a folder. Name the script in it{instead}.")
    if not path.is_file():
        raise BadInput(f"{script} is not a file.")
    try:
        size = path.stat().st_size
        if size > LARGEST_SOURCE:  # parsing 100 MB takes minutes and gigabytes
            raise BadInput(
                f"{script} is too large for a script: {size:,} bytes; the limit is "
                f"{LARGEST_SOURCE:,}."
            )
        text = path.read_bytes()
    except OSError as error:
        raise BadInput(f"Cannot read {script}: {error.strerror}.") from error
    if b"\0" in text:
        raise BadInput(f"{script} is not Python: it is a binary file.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own run shows them
            compile(text, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        at = f" at line {error.lineno}" if error.lineno else ""
        raise BadInput(f"{script} is not Python: {error.msg}{at}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"{script} is not Python that can be compiled: {error}.") from error
    return str(path.absolute())


def captured_spec(capsule: Path, trust: str, asked: ScriptOptions) -> RunSpec:
    """The spec of a capsule's step as a script. It is run again once, as `ampscope replay` does,
    which imports the model's code and says what is wrong with it or with the capsule.

    Raises BadInput without ``trust``, and for what cannot be replayed.
    """
    if asked.script:
        raise BadInput(f"--capsule takes the place of a script: leave {asked.script} out.")
    if not os.path.isfile(capsule):  # Path.is_file raises below a folder that cannot be entered
        raise BadInput(f"There is no capsule at {capsule}.")
    if not trust:
        raise BadInput(
            "A capsule holds no code, and none is imported unless you trust it. Name your function "
            f"that returns the model: ampscope diagnose --capsule {shlex.quote(str(capsule))} "
            "--trust FILE.py:build"
        )
    checked_limits(1, asked.time_limit, asked.memory_limit)
    file, colon, function = trust.partition(":")
    if file.endswith(".py") and os.path.isfile(file):
        trust = f"{Path(file).absolute()}{colon}{function}"
    arguments = (str(capsule.absolute()), "--model", trust)
    command = [*started("ampscope.watcher.replay_child"), *arguments, "--json"]
    done = subprocess.run(
        command, env=ends_with_us(child_environment()), capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        said = done.stderr.strip().splitlines()
        why = (
            said[-1].removeprefix("ampscope: ")
            if said
            else "The replay exited without reporting an error."
        )
        raise BadInput(why)
    # What the user's own code prints comes first.
    about = json.loads(done.stdout[done.stdout.index('{\n  "schema"') :])["about"]
    return RunSpec(
        workload=CAPTURED_STEP,
        kind="script",
        steps=STEPS,
        policy=about["policy"] if asked.policy == "auto" else asked.policy,
        rehearsed=asked.rehearsed,
        time_limit_s=asked.time_limit,
        memory_limit_mib=asked.memory_limit,
        args=arguments,
        label=f"step {about['step']} of run {about['run']}",
        precision="as_is",
        group=secrets.token_hex(4),
    )


class Output:
    """The report, its JSON, and the documents of extensions (their option -> the file). Raises
    BadInput at once for a place that cannot be written.

    JSON on standard output has it for itself; the report then goes to standard error.
    """

    def __init__(
        self, json_out: Path | None, documents: Mapping[str, Path | None] | None = None
    ) -> None:
        self._json_out, self._documents = json_out, documents or {}
        for out in (json_out, *self._documents.values()):
            if out is None or (out == STANDARD_OUTPUT and out is json_out):
                continue
            if os.path.isdir(out):
                raise BadInput(f"Cannot write {out}: it is a folder.")
            if not os.path.isdir(out.absolute().parent):
                raise BadInput(f"Cannot write {out}: there is no folder {out.parent}.")
            written = out if out.exists() and not out.is_file() else out.absolute().parent
            if not os.access(written, os.W_OK):  # a file is written beside its place first
                raise BadInput(f"Cannot write {out}: permission denied.")

    def write(self, report: DiagnosisResult) -> None:
        """What was asked for. Raises BadInput when one cannot be written."""
        for word, out in self._documents.items():
            if out is not None:
                _write(out, extensions.load(extensions.documents()[word])(report))
        if self._json_out == STANDARD_OUTPUT:
            click.echo(to_json(report))
        elif self._json_out is not None:
            _write(self._json_out, to_json(report))

    def show(self, report: DiagnosisResult) -> None:
        """The report for people; of a script that could not be judged one sentence on standard
        error says why."""
        if not report.could_not_run:
            console = Console(stderr=self._json_out == STANDARD_OUTPUT)
            if not console.is_terminal:
                console.width = PIPE_WIDTH
            print_sections(summary(report), console)
        else:
            click.echo(f"ampscope: {visible(report.undecided)}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise BadInput(f"Cannot write {path}: {error.strerror}.") from error


def status_of(report: DiagnosisResult, *, strict: bool = False) -> int:
    """0 no fault, 1 fault found (``strict``: or a latent one), 2 no verdict."""
    if report.undecided:
        return EXIT_UNDECIDED
    faults = report.diagnosis.findings or (strict and report.diagnosis.latent)
    return EXIT_FAULT if faults else EXIT_NO_FAULT


def reason_of(error: BaseException) -> str:
    """One sentence about what ended a diagnosis: a refusal, Ctrl-C, or a fault of ampscope."""
    if isinstance(error, AmpscopeError):
        return str(error)
    if isinstance(error, stopping.TimeIsUp):
        return TIME_IS_UP
    if isinstance(error, KeyboardInterrupt):
        return CANCELLED
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(last.filename).name}:{last.lineno}"
    return f"ampscope itself failed, not the script: {type(error).__name__} at {at}: {error}"


def could_not_run(script: str, policy: str, reason: str) -> DiagnosisResult:
    """The report of a script that never ran."""
    nothing = Diagnosis("inconclusive", (), (), (), policy)
    return DiagnosisResult(script, nothing, {}, (), 0.0, could_not_run=reason)
