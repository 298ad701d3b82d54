"""``ampscope explain AMP012``: a root cause, what shows it, its blind spots, and the remedy."""

from __future__ import annotations

import textwrap

import click

from ampscope.causes import CAUSES, Cause, find_cause
from ampscope.rules.catalog import NAMES, all_rules, patches, sections

WIDTH = 100


@click.command()
@click.argument("cause", required=False)
def explain(cause: str | None) -> None:
    """Explain a root cause by its CODE (AMP012) or name; without one, list all of them."""
    if cause is None:
        for known in CAUSES.values():
            click.echo(f"{known.code}  {known.name:30} {known.title}")
        return
    click.echo(explained(find_cause(cause)))


def explained(cause: Cause) -> str:
    """Title, definition, the four headings of the rule's documentation, code to paste, and a
    failing script of the zoo."""
    parts = [f"{cause.code} {cause.title} ({cause.name})", _wrapped(cause.definition)]
    if cause.name not in NAMES:  # "no fault" has no rule
        return "\n\n".join(parts)
    (rule,) = (rule for rule in all_rules() if rule.id == cause.name)
    for heading, text in sections(rule.documentation):
        parts.append(f"{heading}\n{_wrapped(text, '  ')}")
    code = "\n\n".join(patch.rstrip() for patch in patches(cause.name))
    parts.append("Code\n" + textwrap.indent(code, "  "))
    from ampscope.zoo.score import examples_of  # the other commands need no answer key

    if examples := examples_of(cause.name):
        where = "\n".join(f"  ampscope zoo {case}   {source}" for case, source in examples)
        parts.append(f"Examples (a script that fails this way; the report behind it)\n{where}")
    return "\n\n".join(parts)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
