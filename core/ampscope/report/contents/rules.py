"""What every rule answered, so that a reader sees what was looked for and not found."""

from __future__ import annotations

from ampscope.causes import CAUSES
from ampscope.report.document import Block, Fold, Table
from ampscope.rules.verdict import Status
from ampscope.verdicts.report import Report

_ORDER = (Status.FOUND, Status.INCONCLUSIVE, Status.ERRORED, Status.PASSED, Status.NOT_APPLICABLE)


def blocks(report: Report) -> tuple[Block, ...]:
    """A folded table, what was found first."""
    answers = sorted(report.diagnosis.answers, key=lambda pair: _ORDER.index(pair[1].status))
    rows = tuple(
        (CAUSES[rule.id].title, str(verdict.status).replace("_", " "), verdict.reason)
        for rule, verdict in answers
    )
    table = Table(("Cause", "Answer", "Why"), rows)
    return (Fold(f"All {len(rows)} causes that were looked for", (table,)),)
