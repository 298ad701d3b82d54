"""``ampscope``: the group of commands, and how an error becomes one sentence.

ampscope diagnose train.py                   why a script diverges, and a fix that was run
ampscope diagnose --capsule FILE             the same from a failing step that a training has kept
ampscope explain AMP012                      a root cause: what shows it, and the remedy
ampscope run train.py                        record a script, untouched
ampscope probe gpt --precision fp16,fp32     record a short run of a built-in model or your own
ampscope replay CAPSULE --model mine.py      a failing step of a watched training, again
ampscope runs list|show|ranks|merge|delete   what the store holds
ampscope report RUN --html OUT               a run or diagnosis as one file to hand on
ampscope import FILE                         runs exported elsewhere, checked
ampscope zoo                                 real failures, and how often the answer is right
ampscope hardware                            what this machine can do
ampscope tensor-cores gpt --precision bf16   which matmuls use Tensor Cores
ampscope dashboard                           look at it in a browser

Each extension names its own (:mod:`ampscope.extensions`).
"""

from __future__ import annotations

import sys

from ampscope.cli import stopping

if sys.argv[0].rpartition("/")[2] in ("ampscope", "-m", "main.py"):  # not where a test imports this
    stopping.install()

# The imports below take a moment, in which a signal must end the command already.

import errno
from typing import Any

import click

from ampscope import __version__, extensions
from ampscope.errors import AmpscopeError
from ampscope.files import remove_leftovers
from ampscope.story.document import visible

EXIT_BAD_INPUT = 2
UNUSABLE = (errno.EACCES, errno.ENAMETOOLONG)  # Path.is_file and its like raise these
# Command -> the module that has it, and its name there. A module is imported when its command is
# asked for: all of them together take a second of processor time.
COMMANDS = {
    "diagnose": "ampscope.cli.diagnose:diagnose",
    "explain": "ampscope.cli.zoo:explain",
    "run": "ampscope.cli.diagnose:run_script",
    "probe": "ampscope.cli.probe:probe",
    "replay": "ampscope.cli.diagnose:replay",
    "runs": "ampscope.cli.runs:runs",
    "report": "ampscope.cli.report:report",
    "import": "ampscope.cli.runs:import_runs",
    "zoo": "ampscope.cli.zoo:zoo",
    "tensor-cores": "ampscope.cli.hardware:cores",
    "hardware": "ampscope.cli.hardware:hardware",
    "dashboard": "ampscope.cli.dashboard:dashboard",
    **extensions.commands(),
}
_UNKNOWN: Any = getattr(click.exceptions, "NoSuchCommand", ())  # of click 8.5 or newer


class _Group(click.Group):
    """A group that imports a command when asked for it, and tells AmpscopeError in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        where = COMMANDS.get(cmd_name)
        if where is None:
            return None
        command: click.Command = extensions.load(where)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except _UNKNOWN as error:  # click looks for similar names among imported commands
            raise type(error)(args[0], possibilities=COMMANDS, ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> object:
        with stopping.command():
            remove_leftovers()
            try:
                result = super().invoke(ctx)
            except AmpscopeError as error:
                click.echo(f"ampscope: {visible(str(error))}", err=True)  # it may quote a run
                stopping.ignore()
                sys.exit(EXIT_BAD_INPUT)
            except OSError as error:  # of a path that a user named, asked for before it is opened
                if error.errno not in UNUSABLE or error.filename is None:
                    raise
                said = f"Cannot use {error.filename}: {error.strerror}."
                click.echo(f"ampscope: {visible(said)}", err=True)
                stopping.ignore()
                sys.exit(EXIT_BAD_INPUT)
            except SystemExit:
                stopping.ignore()
                raise
            stopping.ignore()
            return result


@click.group(cls=_Group)
@click.version_option(__version__)
def main() -> None:
    """Diagnostics for mixed-precision training, with measurements."""


if __name__ == "__main__":
    main()
