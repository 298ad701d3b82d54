"""``ampscope``: the group of commands, and how an error becomes one sentence.

ampscope diagnose train.py                   why a script diverges, and a fix that was run
ampscope run train.py                        record a script, untouched
ampscope probe gpt --precision fp16,fp32     record a short run of a built-in model or your own
ampscope replay CAPSULE --model mine.py      a failing step of a watched training, again
ampscope runs list|show|ranks|merge|delete   what the store holds
ampscope report RUN --html OUT               a run or diagnosis as one file to hand on
ampscope import FILE                         runs that somebody else exported, checked
ampscope export RUN --to tensorboard|wandb   a run for other programs, gradients unscaled
ampscope metrics                             a Prometheus endpoint over running trainings
ampscope zoo                                 real failures, and how often the answer is right
ampscope compare gpt --seeds 3               precisions side by side: time, memory, loss
ampscope batch-size gpt --memory-limit 512   the largest batch, predicted and proved
ampscope hardware                            what this machine can do
ampscope cores gpt --precision bf16          which products use Tensor Cores
ampscope frameworks install|check|compare    Keras and Paddle beside PyTorch
ampscope dashboard                           look at it in a browser
"""

from __future__ import annotations

import sys
from pathlib import Path

from ampscope.cli import stopping

if Path(sys.argv[0]).name in ("ampscope", "-m", "main.py"):  # not where a test imports this
    stopping.install()  # before the imports below, which take half a second

import click  # see above

from ampscope import __version__  # see above
from ampscope.cli.compare import (
    batch_size,  # see above
    compare,  # see above
)
from ampscope.cli.dashboard import dashboard  # see above
from ampscope.cli.diagnose import (  # see above
    diagnose,
    replay,  # see above
    run_script,
)
from ampscope.cli.export import (
    export,  # see above
    metrics,  # see above
    report,  # see above
)
from ampscope.cli.frameworks import frameworks  # see above
from ampscope.cli.hardware import (
    cores,  # see above
    hardware,  # see above
)
from ampscope.cli.probe import probe  # see above
from ampscope.cli.runs import (
    import_runs,  # see above
    runs,  # see above
)
from ampscope.cli.zoo import zoo  # see above
from ampscope.errors import AmpscopeError  # see above
from ampscope.files import remove_leftovers  # see above
from ampscope.report.document import visible  # see above

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
    diagnose, run_script, probe, replay, runs, report, import_runs, export, metrics, zoo, compare,
    batch_size, cores, hardware, frameworks, dashboard,
)  # fmt: skip
for command in _COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    main()
