"""``ampscope zoo``: diagnose the fault zoo and print how often the answer was right.
``ampscope explain AMP012``: what a root cause is, with scripts of the zoo that show it.
"""

from __future__ import annotations

import dataclasses
import statistics
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from ampscope import extensions
from ampscope.causes import CAUSES, Cause, StableCode, find_cause
from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.hardware.describe import describe_machine, one_line
from ampscope.record_json import dumps
from ampscope.rules.catalog import NAMES, all_rules, patches, sections

if TYPE_CHECKING:
    from ampscope.zoo.score import Score

WIDTH = 100  # of explanations, in characters


@click.command()
@click.argument("cases", nargs=-1)
@click.option("--json", "json_out", type=click.Path(path_type=Path), help="Write the scores here.")
@click.option("--no-twins", is_flag=True, help="Leave the healthy scripts out.")
@store_option
def zoo(cases: tuple[str, ...], json_out: Path | None, no_twins: bool, store: Path) -> None:
    """Diagnose the zoo's CASES (all when none is named), and their healthy twins."""
    from ampscope.zoo.score import scores  # the other commands need no answer key

    console = Console(stderr=True)
    wanted = tuple(case.lower() for case in cases)

    def say(name: str) -> None:
        console.print(f"Running: {name}")

    found = list(scores(wanted, store, say, healthy=not no_twins))
    if not found:
        raise BadInput(f"The zoo has no case {', '.join(cases)}.")
    Console(width=150).print(score_table(found))
    for line in summary(found):
        click.echo(line)
    if json_out is not None:
        json_out.write_text(dumps(as_json(found), indent=1))


def as_json(found: list[Score]) -> dict[str, object]:
    """The kept form of a scored zoo."""
    return {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": one_line(describe_machine()),
        "summary": summary(found),
        "scores": [
            dataclasses.asdict(s) | {"right": s.right, "module_right": s.module_right}
            for s in found
        ],
    }


def score_table(found: list[Score]) -> Table:
    """One row per faulty script; healthy ones only when they raised an alarm."""
    table = Table()
    for name in ("case", "expected", "found first", "in three", "module", "fix", "verified", "s"):
        table.add_column(name)
    for s in found:
        if not s.case and s.right:
            continue
        module = {None: "", True: "right", False: f"{s.module_found} for {s.module_expected}"}[
            s.module_right
        ]
        table.add_row(
            s.case or s.script, s.expected, s.found, "yes" if s.among_three else "no", module,
            s.fix_kind, {None: "", True: "yes", False: "no"}[s.verified], f"{s.elapsed_s:.0f}",
        )  # fmt: skip
    return table


def summary(found: list[Score]) -> list[str]:
    """The figures that count, each with its base."""
    faulty = [s for s in found if s.case]
    twins = [s for s in found if not s.case]
    lines = []
    if faulty:
        modules = [s for s in faulty if s.module_right is not None]
        can = [s for s in faulty if s.can_verify]
        lines = [
            f"root cause first: {sum(s.right for s in faulty)} of {len(faulty)}",
            f"among the first three: {sum(s.among_three for s in faulty)} of {len(faulty)}",
            f"module right: {sum(bool(s.module_right) for s in modules)} of {len(modules)}",
            (
                f"fix verified where ampscope can apply it: {sum(bool(s.verified) for s in can)} of"
                f" {len(can)}"
            ),
            (
                f"seconds a diagnosis: median {statistics.median(s.elapsed_s for s in faulty):.0f},"
                f" worst {max(s.elapsed_s for s in faulty):.0f}"
            ),
        ]
    if twins:
        lines.append(
            f"false alarms: {sum(not s.right for s in twins)} of {len(twins)} healthy scripts"
        )
    return lines


@click.command()
@click.argument("cause", required=False)
def explain(cause: str | None) -> None:
    """Explain a root cause or a code of preflight by its CODE (AMP012, PRE001) or name; without
    one, list all of them."""
    own = [code for code in extensions.codes().values() if code.name not in CAUSES]
    if cause is None:
        listed: list[Cause | StableCode] = [*CAUSES.values(), *own]
        for known in listed:
            click.echo(f"{known.code}  {known.name:30} {known.title}")
        return
    for code in own:
        if cause.strip().lower() in (code.code.lower(), code.name):
            click.echo(explained_code(code))
            return
    click.echo(explained(find_cause(cause)))


def explained_code(code: StableCode) -> str:
    """Title, what preflight reports it on, and the remedy."""
    parts = [f"{code.code} {code.title} ({code.name})"]
    parts += [
        f"{heading}\n{_wrapped(text, '  ')}"
        for heading, text in (("What preflight sees", code.evidence), ("Remedy", code.remedy))
    ]
    return "\n\n".join(parts)


def explained(cause: Cause) -> str:
    """Title, definition, the four headings of the rule's documentation, code to paste, and a
    failing script of the zoo."""
    parts = [f"{cause.code} {cause.title} ({cause.name})", _wrapped(cause.definition)]
    if cause.name not in NAMES:  # "no fault" has no rule
        return "\n\n".join(parts)
    (rule,) = (rule for rule in all_rules() if rule.id == cause.name)
    for heading, text in sections(rule.documentation):
        parts.append(f"{heading}\n{_wrapped(text, '  ')}")
    pasted = "\n\n".join(patch.rstrip() for patch in patches(cause.name))
    parts.append("Code\n" + textwrap.indent(pasted, "  "))
    if code := extensions.codes().get(cause.name):
        parts.append(f"What preflight sees\n{_wrapped(code.evidence, '  ')}")
    from ampscope.zoo.answers import examples_of

    if examples := examples_of(cause.name):
        where = "\n".join(f"  ampscope zoo {case}   {source}" for case, source in examples)
        parts.append(f"Examples (a script that fails this way; the report behind it)\n{where}")
    return "\n\n".join(parts)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
