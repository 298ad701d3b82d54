"""``ampscope budget``: a script against the limits of its project, and against a base commit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from ampscope.analysis.run_view import RunView
from ampscope.cli.diagnose import checked_limits, checked_script
from ampscope.cli.options import own_table, store_option
from ampscope.cli.progress import say_unused_gpu
from ampscope.control import BASELINE
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.errors import BadInput
from ampscope.ext.budget.base_commit import at_base
from ampscope.ext.budget.budgets import (
    BudgetOutcome,
    Budgets,
    budgets_of,
    judge_islands,
    judge_lost,
    judge_time,
)
from ampscope.ext.preflight import junit, sarif
from ampscope.files import write_whole
from ampscope.launcher.children import child_environment, started
from ampscope.launcher.plan import run_diagnosis
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import AUTO, RunSpec
from ampscope.store.reader import Reader
from ampscope.story.document import visible

EXIT_KEPT, EXIT_EXCEEDED, EXIT_NOT_MEASURED = 0, 1, 2
ROUNDS = 3  # of head and base, interleaved
_CODES = {
    "lost_gradients": ("BUD001", "Gradients lost to half precision"),
    "new_fp32_islands": ("BUD002", "A new fp32 island"),
    "step_time_ratio": ("BUD003", "Slower steps than the base"),
}


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--base", help="A commit or branch of the script's git repository, or a folder.")
@click.option("--steps", default=30, show_default=True, help="Optimizer steps of each run.")
@click.option("--time-limit", default=120.0, show_default=True, help="Seconds per run.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="A pyproject.toml.  [default: the nearest above SCRIPT]",
)
@click.option("--junit", "junit_out", type=click.Path(path_type=Path), help="Write JUnit XML.")
@click.option("--sarif", "sarif_out", type=click.Path(path_type=Path), help="Write SARIF 2.1.0.")
@store_option
def budget(
    script: str, args: tuple[str, ...], base: str | None, steps: int, time_limit: float,
    config: Path | None, junit_out: Path | None, sarif_out: Path | None, store: Path,
) -> None:  # fmt: skip
    """Run SCRIPT and compare what its mixed precision costs with [tool.ampscope.budget].

    Exit status: 0 all budgets kept, 1 one exceeded, 2 bad input or not measured.
    """
    checked_limits(steps, time_limit, 0)
    path = checked_script(script)
    limits = _limits(Path(path), config)
    if limits.need_base and base is None:
        raise BadInput(
            f"{' and '.join(limits.need_base)} are measured against a base: name one with "
            "--base, as in --base origin/main."
        )
    spec = RunSpec(
        workload=path, kind="script", steps=steps, policy="auto", time_limit_s=time_limit,
        args=args, label=Path(path).name, precision="as_is", group=os.urandom(4).hex(),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(at_base(Path(path), base)) if base is not None else None
        outcomes = _measured(limits, spec, other, store)
    for outcome in outcomes:
        word = {True: "kept", False: "EXCEEDED", None: "not measured"}[outcome.kept]
        click.echo(f"{outcome.name}: {word}. {visible(outcome.sentence)}")
    _write(junit_out, _junit(outcomes))
    _write(sarif_out, json.dumps(_sarif(outcomes, Path(path)), indent=2))
    if any(outcome.kept is False for outcome in outcomes):
        sys.exit(EXIT_EXCEEDED)
    sys.exit(EXIT_NOT_MEASURED if any(o.kept is None for o in outcomes) else EXIT_KEPT)


def _limits(script: Path, config: Path | None) -> Budgets:
    if config is None:
        files = (folder / "pyproject.toml" for folder in script.parents)
        config = next((file for file in files if os.path.isfile(file)), None)
        if config is None:
            raise BadInput(
                f"There is no pyproject.toml above {script}: set budgets in its table "
                "[tool.ampscope.budget], or name one with --config."
            )
    return budgets_of(own_table(config, "budget"), str(config))


def _measured(
    limits: Budgets, spec: RunSpec, base: Path | None, store: Path
) -> list[BudgetOutcome]:
    say_unused_gpu()
    report = run_diagnosis(spec, store, lambda text: _say(f"Running: {text}"), None, verify=False)
    if report.could_not_run:
        raise BadInput(f"{spec.label} could not be run: {report.could_not_run}")
    head = _view(report, BASELINE, store)
    found: list[BudgetOutcome] = []
    if limits.lost_gradients is not None:
        fp32 = _view(report, "fp32", store) if "fp32" in report.runs else None
        found.append(judge_lost(limits.lost_gradients, head, fp32))
    if base is None:
        return found
    if limits.new_fp32_islands is not None:
        policy = report.runs[BASELINE].spec.policy
        policy = "native" if policy == AUTO else policy  # the rules that the head was judged under
        other = replace(spec, workload=str(base), policy=policy, group=os.urandom(4).hex())
        _say("Running: the base")
        with ScriptRuns(replace(other, control=BASELINE), store, private=True) as runs:
            done = runs.run(BASELINE)
        view = RunView(BASELINE, done.info.id, done.observations)
        if not view.steps:
            raise BadInput(f"{spec.label} makes no optimizer step at the base.")
        found.append(judge_islands(limits.new_fp32_islands, head, view))
    if limits.step_time_ratio is not None:
        _say(f"Running: step times without instruments, {ROUNDS} rounds")
        times: dict[Path, list[list[float]]] = {Path(spec.workload): [], base: []}
        for turn in range(ROUNDS):  # each goes first in turns: a machine warms up, or gets busy
            for script in list(times)[:: 1 if turn % 2 == 0 else -1]:
                times[script].append(_step_times(script, spec))
        head_times, base_times = times.values()
        found.append(judge_time(limits.step_time_ratio, head_times, base_times))
    return found


def _view(report: DiagnosisResult, control: str, store: Path) -> RunView:
    run_id = report.runs[control].id
    with Reader(store) as reader:
        return RunView(control, run_id, tuple(reader.observations(run_id)))


def _step_times(script: Path, spec: RunSpec) -> list[float]:
    """Seconds of each step of a run without instruments; empty where there are none."""
    with tempfile.TemporaryDirectory(prefix="ampscope-clock-") as folder:
        out = Path(folder, "times.json")
        command = [*started("ampscope.runner.step_clock"), str(spec.steps), str(out)]
        try:
            subprocess.run(
                [*command, str(script), *spec.args],
                env=child_environment(),
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=spec.time_limit_s,
            )
        except subprocess.TimeoutExpired:
            return []
        if not out.exists():
            return []
        return [float(value) for value in json.loads(out.read_text())]


def _say(text: str) -> None:
    click.echo(visible(text), err=True)


def _junit(outcomes: Sequence[BudgetOutcome]) -> str:
    kinds = {True: "passed", False: "failure", None: "error"}
    return junit.document(
        "ampscope budget",
        "budget",
        [junit.TestCase(o.name, kinds[o.kept], o.sentence) for o in outcomes],  # type: ignore[arg-type]  # one of the three
    )


def _sarif(outcomes: Sequence[BudgetOutcome], script: Path) -> dict[str, object]:
    rules = [
        sarif.SarifRule(code, name, title, f"The budget {name} of pyproject.toml.", title, "error")
        for name, (code, title) in _CODES.items()
    ]
    shown = os.path.relpath(script)
    shown = str(script) if shown.startswith("..") else shown
    results = []
    for outcome in outcomes:
        if outcome.kept is not False:
            continue
        code = _CODES[outcome.name][0]
        for island in outcome.islands:
            file, _, number = island.line.rpartition(":")
            place = Path(shown).parent / file
            results.append(
                sarif.SarifResult(
                    code,
                    "error",
                    f"{island.op} runs in fp32, and did not at the base.",
                    str(place),
                    int(number) if number.isdecimal() else 0,
                )
            )
        if not outcome.islands:
            results.append(sarif.SarifResult(code, "error", outcome.sentence, shown))
    notes = [o.sentence for o in outcomes if o.kept is None]
    return sarif.log(rules, results, notes)


def _write(out: Path | None, text: str) -> None:
    if out is None:
        return
    try:
        write_whole(out, text + "\n")
    except OSError as error:
        raise BadInput(f"Cannot write {out}: {error.strerror}.") from error
