"""docs/causes.md, printed from the rules themselves: ``python -m ampscope.report.rule_docs``."""

from __future__ import annotations

import inspect

from ampscope.causes import CAUSES, FIX_KINDS
from ampscope.rules.catalog import all_rules

INTRODUCTION = """# Root causes

What `ampscope diagnose` can name, printed from the rules (`python -m ampscope.report.rule_docs`).
Each rule is one file in `core/ampscope/rules/`; it sees the evidence of the runs and nothing else.
"""


def render() -> str:
    """The whole document."""
    parts = [INTRODUCTION]
    for rule in all_rules():
        cause = CAUSES[rule.id]
        parts.append(f"## {cause.title}\n\n`{rule.id}`. {cause.definition}\n")
        for heading, text in sections(rule.documentation):
            parts.append(f"**{heading}.** {text}\n")
    kinds = "\n".join(f"- `{kind}`: {sentence}" for kind, sentence in FIX_KINDS.items())
    parts.append(f"## Kinds of fix\n\n{kinds}\n")
    return "\n".join(parts)


def sections(documentation: str) -> list[tuple[str, str]]:
    """(heading, text) of a rule's docstring: a heading is a line with no indentation."""
    found: list[tuple[str, list[str]]] = []
    for line in inspect.cleandoc(documentation).splitlines()[1:]:
        if line and not line.startswith(" "):
            found.append((line.strip(), []))
        elif line.strip() and found:
            found[-1][1].append(line.strip())
    return [(heading, " ".join(lines)) for heading, lines in found]


if __name__ == "__main__":
    print(render(), end="")
