"""``ampscope``: the group of commands, and how an error becomes one sentence.

ampscope diagnose train.py                   why a script diverges, and a fix that was run
ampscope diagnose --capsule FILE             the same from a failing step that a training has kept
ampscope diff train.py --against v1.0        from where on one run computes something else
ampscope preflight train.py                  what can be known before it runs
ampscope check CKPT                          whether a checkpoint is poisoned
ampscope explain AMP012                      a root cause: what shows it, and the remedy
ampscope run train.py                        record a script, untouched
ampscope probe gpt --precision fp16,fp32     record a short run of a built-in model or your own
ampscope replay CAPSULE --model mine.py      a failing step of a watched training, again
ampscope runs list|show|ranks|merge|delete   what the store holds
ampscope report RUN --html OUT               a run or diagnosis as one file to hand on
ampscope import FILE                         runs exported elsewhere, checked
ampscope export RUN --to mlflow|wandb|…       a run for other programs, gradients unscaled
ampscope metrics                             a Prometheus endpoint over running trainings
ampscope zoo                                 real failures, and how often the answer is right
ampscope compare gpt --seeds 3               precisions side by side: time, memory, loss
ampscope batch-size gpt --memory-limit 512   the largest batch, predicted and proved
ampscope hardware                            what this machine can do
ampscope tensor-cores gpt --precision bf16   which matmuls use Tensor Cores
ampscope frameworks install|check|compare    Keras and Paddle beside PyTorch
ampscope mcp --scripts DIR                   the same for a coding agent
ampscope dashboard                           look at it in a browser
"""

from __future__ import annotations

import sys

from ampscope.cli import stopping

if sys.argv[0].rpartition("/")[2] in ("ampscope", "-m", "main.py"):  # not where a test imports this
    stopping.install()

# The imports below take half a second, in which a signal must end the command already.

import copy

import click

from ampscope import __version__
from ampscope.cli.budget import budget
from ampscope.cli.check import check
from ampscope.cli.compare import batch_size, compare
from ampscope.cli.dashboard import dashboard
from ampscope.cli.diagnose import diagnose, replay, run_script
from ampscope.cli.diff import diff
from ampscope.cli.export import export, metrics, report
from ampscope.cli.frameworks import frameworks
from ampscope.cli.hardware import cores, hardware
from ampscope.cli.mcp import mcp
from ampscope.cli.preflight import preflight
from ampscope.cli.probe import probe
from ampscope.cli.runs import import_runs, runs
from ampscope.cli.zoo import explain, zoo
from ampscope.errors import AmpscopeError
from ampscope.files import remove_leftovers
from ampscope.report.document import visible

EXIT_BAD_INPUT = 2


class _Group(click.Group):
    """A group whose commands may raise AmpscopeError."""

    def invoke(self, ctx: click.Context) -> object:
        with stopping.command():
            remove_leftovers()
            try:
                result = super().invoke(ctx)
            except AmpscopeError as error:
                click.echo(f"ampscope: {visible(str(error))}", err=True)  # it may quote a run
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


_COMMANDS = (
    diagnose, budget, diff, preflight, check, explain, run_script, probe, replay, runs, report,
    import_runs, export, metrics, zoo, compare, batch_size, cores, hardware, frameworks, mcp,
    dashboard,
)  # fmt: skip
for command in _COMMANDS:
    main.add_command(command)
_former = copy.copy(cores)  # the former name of tensor-cores, accepted for one more version
_former.hidden = True
main.add_command(_former, "cores")


if __name__ == "__main__":
    main()
