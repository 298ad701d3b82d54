"""``ampscope diff``: one run against another, and what changed between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ampscope.cli import stopping
from ampscope.cli.diagnose import (
    PIPE_WIDTH,
    STANDARD_OUTPUT,
    Output,
    checked_limits,
    checked_script,
    reason_of,
)
from ampscope.cli.options import leave_out_option, memory_limit_option, store_option
from ampscope.cli.progress import say_unused_gpu
from ampscope.control import BASELINE, Control
from ampscope.errors import BadInput
from ampscope.ext.diff import words
from ampscope.ext.diff.runs import (
    REPEATS,
    DiffOptions,
    DiffResult,
    NewRun,
    Recorded,
    ids_of,
    recorded,
    run_diff,
    worktree,
)
from ampscope.files import write_whole
from ampscope.masks import masked, masked_argument
from ampscope.pythons import TORCH, framework_of
from ampscope.records import AUTO, RunSpec
from ampscope.store.reader import Reader
from ampscope.story.document import visible

EXIT = {"same": 0, "different": 1, "unknown": 125}  # 125: git bisect skips this commit
STEPS = 30
_SAY_WHAT_B_IS = {"variables", "with_args", "under", "python", "against", "commits"}
_OPTIONS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class _Oracle(click.Command):
    """A command for `git bisect run`: what it was called with is no verdict on a commit either."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            error.exit_code = EXIT["unknown"]  # type: ignore[misc] # click reads the instance's
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Also takes `train.py --with A=1`: behind a script without a B, options are ours."""
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        behind = _positional(given)[1:]
        if behind and behind[0].startswith("--") and not given.keys() & _SAY_WHAT_B_IS:
            ours, _, _ = self.make_parser(ctx).parse_args(list(behind))
            end = len(behind) - len(_positional(ours))  # from there on it is the script's own
            at = len(args) - len(behind) - 1
            args = [*args[:at], *behind[:end], args[at], *behind[end:]]
        return super().parse_args(ctx, args)


def _positional(given: Mapping[str, Any]) -> list[str]:
    """What is no option, of what click's parser found; it marks what is missing in its own way."""
    first, rest = given.get("first"), given.get("rest")
    found = [first] if isinstance(first, str) else []
    return found + (list(rest) if isinstance(rest, list | tuple) else [])


@click.command("diff", cls=_Oracle, context_settings=_OPTIONS)
@click.argument("first")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
@click.option("--with", "variables", multiple=True, metavar="NAME=VALUE",
              help="B is A with this variable in its environment.")  # fmt: skip
@click.option("--with-args", help="B is A with these arguments, quoted as in a shell.")
@click.option("--under", help="B is A under a control: fp32, bf16, eps:1e-4, fp32_modules:head.")
@click.option("--python", help="B is A, run by this Python; it must have ampscope's dependencies.")
@click.option("--against", metavar="COMMIT", help="A is the script at this commit, B as it is now.")
@click.option("--commits", metavar="OLD..NEW", help="The script at these two commits.")
@click.option("--repeats", default=REPEATS, show_default=True, help="Runs of A, for the noise.")
@click.option("--seeds", default=0, show_default=True, help="Further runs of A with other seeds.")
@click.option("--steps", default=STEPS, show_default=True, help="Optimizer steps at most.")
@click.option("--time-limit", default=120.0, show_default=True, help="Seconds per run.")
@memory_limit_option
@click.option("--policy", type=click.Choice((AUTO, "native", "cuda")), default=AUTO,
              show_default=True, help="On a CPU: its own rules, or CUDA's, rehearsed; auto: CUDA's "
              "where A or B needs CUDA.")  # fmt: skip
@click.option(
    "--tolerance",
    default=0.0,
    show_default=True,
    help="Relative distances up to this are no difference.",
)
@click.option(
    "--allow-rounding",
    is_flag=True,
    help="What rounding to the formats in use explains is no difference.",
)
@click.option(
    "--json",
    "json_out",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write the result here; - is standard output.",
)
@click.option("--quiet", is_flag=True, help="Do not say what is being run.")
@leave_out_option
@store_option
def diff(
    first: str, rest: tuple[str, ...], variables: tuple[str, ...], with_args: str | None,
    under: str | None, python: str | None, against: str | None, commits: str | None, repeats: int,
    seeds: int, steps: int, time_limit: float, memory_limit: int, policy: str, tolerance: float,
    allow_rounding: bool, json_out: Path | None, quiet: bool, store: Path,
) -> None:  # fmt: skip
    """Say from which step, module and op on run B computes something else than run A.

    A and B are runs of the store or scripts: `diff A.py B.py`, `diff RUN B.py`, `diff RUN RUN`.
    With an option that says what B is, the arguments behind the script are the script's.

    Exit status: 0 the same within noise, 1 different, 125 could not tell.
    """
    progress = Console(stderr=True)

    def say(text: str) -> None:
        if not quiet:
            progress.print(f"Running: {text}", markup=False, soft_wrap=True)

    try:
        Output(json_out)  # a place that cannot be written is told before anything runs
        checked_limits(steps, time_limit, memory_limit)
        if repeats < 1 or seeds < 0 or not tolerance >= 0:
            raise BadInput("Repeats must be 1 or more, seeds and the tolerance 0 or more.")
        spec = RunSpec(
            workload="", kind="script", steps=steps, policy=policy, time_limit_s=time_limit,
            memory_limit_mib=memory_limit, precision=BASELINE, group=secrets.token_hex(4),
        )  # fmt: skip
        changes = _Changes(variables, with_args, under, python, against, commits)
        options = DiffOptions(repeats, seeds, tolerance, allow_rounding)
        with contextlib.ExitStack() as stack:
            a, b = changes.sides(stack, spec, first, rest, store)
            if isinstance(a, NewRun) or isinstance(b, NewRun):
                say_unused_gpu()
            result = run_diff(a, b, store, options, say)
    except (Exception, KeyboardInterrupt) as error:  # status 1 or 2 would be "different" in bisect
        reason = reason_of(error)
        stopping.ignore()
        _write(json_out, words.unknown_document(reason))
        click.echo(f"ampscope: Could not tell. {visible(reason)}", err=True)
        sys.exit(EXIT["unknown"])
    stopping.ignore()
    ids = result.first_ids, result.second_ids
    _write(json_out, words.document(result.diff, result.names, ids, result.notes))
    console = Console(stderr=json_out == STANDARD_OUTPUT)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    _show(result, console)
    sys.exit(EXIT[result.diff.verdict])


class _Changes:
    """What the options say that B is. Raises BadInput for what does not go together."""

    def __init__(
        self,
        variables: tuple[str, ...],
        with_args: str | None,
        under: str | None,
        python: str | None,
        against: str | None,
        commits: str | None,
    ) -> None:
        self._variables = dict(_variable(text) for text in variables)
        self._args = None if with_args is None else _words(with_args)
        self._under = under
        self._python = python
        if against and commits:
            raise BadInput("Use --against or --commits, not both.")
        old, dots, new = (commits or "").partition("..")
        if commits and not (old and dots and new):
            raise BadInput(f"--commits takes two commits, as in v1.0..HEAD; not {commits!r}.")
        self._old, self._new = against or old, new
        if under is not None:
            Control(under).check()

    @property
    def says_what_b_is(self) -> bool:
        """Whether B needs no name of its own."""
        parts = (self._variables, self._args is not None, self._under, self._python, self._old)
        return any(parts)

    def sides(
        self,
        stack: contextlib.ExitStack,
        spec: RunSpec,
        first: str,
        rest: tuple[str, ...],
        store: Path,
    ) -> tuple[NewRun | Recorded, NewRun | Recorded]:
        """A and B."""
        if self.says_what_b_is:
            second, args = first, rest
        elif rest:
            second, args = rest[0], rest[1:]
        else:
            raise BadInput("Name B as well: another run or script, or an option that says it.")
        if args[:1] == ("--",):
            args = args[1:]
        a = _side(stack, spec, first, args, self._old, store)
        b = _side(stack, spec, second, args, self._new, store)
        if not self.says_what_b_is:
            return a, b
        if isinstance(b, Recorded):
            raise BadInput(
                f"{first} is a recorded run. An option that says what B is needs a script."
            )
        changed = [masked_argument(f"{name}={value}") for name, value in self._variables.items()]
        if self._args is not None:
            b = replace(b, spec=replace(b.spec, args=self._args))
            changed.append(shlex.join(masked(self._args)))
        if self._python:
            found = shutil.which(self._python)
            if found is None:
                raise BadInput(f"There is no Python {self._python}.")
            b = replace(b, python=found)
            changed.append(found)
        if self._under:
            b = replace(b, control=self._under)
            changed.append(f"control {self._under}")
        name = " with ".join([b.name, ", ".join(changed)]) if changed else b.name
        return a, replace(b, name=name, variables=self._variables)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or "\0" in text:
        raise BadInput(f"--with takes NAME=VALUE, not {text!r}.")
    return name, value


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadInput(f"--with-args cannot be read: {error}.") from error


def _side(
    stack: contextlib.ExitStack,
    spec: RunSpec,
    named: str,
    args: tuple[str, ...],
    revision: str,
    store: Path,
) -> NewRun | Recorded:
    if not revision and not os.path.lexists(named) and ids_of([named], store):
        with Reader(store) as reader:
            return recorded(reader, named)
    script, folder, name = Path(named), None, Path(named).name
    if revision:
        script, folder = stack.enter_context(worktree(script, revision))
        name = f"{name} at {revision}"
    if not revision and not os.path.lexists(named) and not named.startswith("-"):
        raise BadInput(f"There is no file {named}, and no recorded run of that id.")
    path = checked_script(str(script))
    if framework_of(Path(path)) != TORCH:
        raise BadInput(f"{named} trains with another framework; ampscope diff compares torch.")
    return NewRun(replace(spec, workload=path, args=args, label=name), name, folder=folder)


def _write(out: Path | None, parts: dict[str, object]) -> None:
    if out is None:
        return
    text = words.to_json(parts)
    if out == STANDARD_OUTPUT:
        click.echo(text)
        return
    try:
        write_whole(out, text + "\n")
    except OSError as error:
        click.echo(f"ampscope: Cannot write {out}: {error.strerror}.", err=True)
        sys.exit(EXIT["unknown"])


def _show(result: DiffResult, console: Console) -> None:
    found = result.diff
    for name, side, ids in zip(
        "AB", result.names, (result.first_ids, result.second_ids), strict=True
    ):
        runs = f" (run {', '.join(ids)})" if ids and not side.startswith("run ") else ""
        console.print(Text(f"{name}: {visible(side)}{runs}"))
    console.print()
    for place, sentence in enumerate([*words.sentences(found), *result.notes]):
        console.print(Text(sentence, style="bold" if not place else ""))
    if found.ledger or found.verdict != "unknown":
        console.print(Text(words.ledger_sentence(found.ledger)))
    if found.ledger:
        rows = words.ledger_rows(found.ledger)
        console.print(_table(("", "tensor", "in A", "in B"), rows))
    if any(s.first for s in found.settings) and any(s.second for s in found.settings):
        settings = [(s.name, s.first or "none", s.second or "none") for s in found.settings]
        console.print(_table(("around the runs", "in A", "in B"), settings))


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*heads, box=None, pad_edge=False)
    for row in rows[: words.MOST_ROWS]:
        table.add_row(*(Text(visible(cell)) for cell in row))
    if len(rows) > words.MOST_ROWS:
        left = len(rows) - words.MOST_ROWS
        table.add_row(Text(f"… and {left:,} more: --json has them"))
    return table
