"""Where a diagnosis goes: a report for people, JSON for programs, an exit status for CI."""

from __future__ import annotations

import traceback
from pathlib import Path

import click
from rich.console import Console

from ampscope.diagnose import Diagnosis
from ampscope.errors import AmpscopeError, BadInput
from ampscope.report.contract import to_json
from ampscope.report.plain import visible
from ampscope.report.terminal import print_report
from ampscope.verdicts.report import Report
from ampscope.whole_files import write_whole

EXIT_NO_FAULT, EXIT_FAULT, EXIT_UNDECIDED = 0, 1, 2
STANDARD_OUTPUT = Path("-")
CANCELLED = "Cancelled. What was recorded is kept."
PIPE_WIDTH = 120  # columns where nobody's terminal sets them


class Output:
    """The report and its JSON. Raises BadInput at once for a place that cannot be written.

    JSON on standard output has it for itself; the report then goes to standard error.
    """

    def __init__(self, json_out: Path | None) -> None:
        self._json_out = json_out
        if json_out is None or json_out == STANDARD_OUTPUT:
            return
        if json_out.is_dir():
            raise BadInput(f"Cannot write {json_out}: it is a folder.")
        if not json_out.absolute().parent.is_dir():
            raise BadInput(f"Cannot write {json_out}: there is no folder {json_out.parent}.")

    def write(self, report: Report) -> None:
        """The JSON, where it was asked for. Raises BadInput when it cannot be written."""
        if self._json_out is None:
            return
        if self._json_out == STANDARD_OUTPUT:
            click.echo(to_json(report))
            return
        try:
            write_whole(self._json_out, to_json(report) + "\n")
        except OSError as error:
            raise BadInput(f"Cannot write {self._json_out}: {error.strerror}.") from error

    def show(self, report: Report) -> None:
        """The report for people; of a script that could not be judged one sentence on standard
        error says why."""
        if not report.could_not_run:
            console = Console(stderr=self._json_out == STANDARD_OUTPUT)
            if not console.is_terminal:
                console.width = PIPE_WIDTH
            print_report(report, console)
        else:
            click.echo(f"ampscope: {visible(report.undecided)}", err=True)


def status_of(report: Report) -> int:
    """0 no fault, 1 fault found, 2 no verdict."""
    if report.undecided:
        return EXIT_UNDECIDED
    return EXIT_FAULT if report.diagnosis.findings else EXIT_NO_FAULT


def reason_of(error: BaseException) -> str:
    """One sentence about what ended a diagnosis: a refusal, Ctrl-C, or a fault of ampscope."""
    if isinstance(error, AmpscopeError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return CANCELLED
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(last.filename).name}:{last.lineno}"
    return f"ampscope itself failed, not the script: {type(error).__name__} at {at}: {error}"


def could_not_run(script: str, policy: str, reason: str) -> Report:
    """The report of a script that never ran."""
    nothing = Diagnosis("inconclusive", (), (), (), policy)
    return Report(script, nothing, {}, (), 0.0, could_not_run=reason)
