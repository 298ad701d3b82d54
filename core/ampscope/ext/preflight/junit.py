"""Results of checks as JUnit XML, which CI systems show beside those of tests.

Every text may come from a file or a run, so it is escaped, and what XML cannot hold becomes "?".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape, quoteattr


@dataclass(frozen=True, slots=True)
class TestCase:
    """One check. ``message`` is one sentence on how it ended, ``text`` what stands below it."""

    name: str
    outcome: Literal["passed", "failure", "error"] = "passed"
    message: str = ""
    text: str = ""


def document(suite: str, group: str, cases: Sequence[TestCase]) -> str:
    """The cases of one suite, all of the class name ``group``, without a last line end."""
    failures = sum(case.outcome == "failure" for case in cases)
    errors = sum(case.outcome == "error" for case in cases)
    return "\n".join(
        [
            '<?xml version="1.0" encoding="utf-8"?>',
            "<testsuites>",
            f'<testsuite name={_quoted(suite)} tests="{len(cases)}" failures="{failures}" '
            f'errors="{errors}" skipped="0">',
            *(_case(group, case) for case in cases),
            "</testsuite>",
            "</testsuites>",
        ]
    )


def _case(group: str, case: TestCase) -> str:
    head = f"<testcase classname={_quoted(group)} name={_quoted(case.name)}"
    if case.outcome == "passed":
        said = escape(_clean(case.message))
        return f"{head}><system-out>{said}</system-out></testcase>" if said else f"{head}/>"
    inside = f"<{case.outcome} message={_quoted(case.message)}"
    inside += f">{escape(_clean(case.text))}</{case.outcome}>" if case.text else "/>"
    return f"{head}>{inside}</testcase>"


def _quoted(text: str) -> str:
    return quoteattr(_clean(text))


def _clean(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
