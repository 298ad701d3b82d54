"""What every rule answered, folded away, and the text that each one is documented with."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.causes import CAUSES
from ampscope.report import rule_docs
from ampscope.rules.verdict import Rule, Status, Verdict
from ampscope.verdicts.report import Report
from app import layout, links
from app.text import escape

_TITLES = {
    Status.FOUND: "found",
    Status.INCONCLUSIVE: "inconclusive",
    Status.ERRORED: "failed themselves",
    Status.PASSED: "passed",
    Status.NOT_APPLICABLE: "not applicable",
}
Answer = tuple[Rule, Verdict]


def show(report: Report) -> None:
    """A folded table for each kind of answer, then any rule's documentation."""
    st.subheader("What every rule answered", anchor=False)
    answers = report.diagnosis.answers
    groups = {s: [a for a in answers if a[1].status is s] for s in _TITLES}
    counted = ", ".join(f"{len(groups[s])} {title}" for s, title in _TITLES.items() if groups[s])
    layout.see(f"{len(answers)} rules looked at the evidence: {counted}.")
    for status, title in _TITLES.items():
        if groups[status] and status is not Status.FOUND:
            with layout.details(f"Rules: {title} ({len(groups[status])})"):
                st.table(_table(groups[status]).set_index("Cause"), border="horizontal")
    with layout.details("What a rule looks for"):
        _documentation(answers)


def sections(documentation: str) -> list[tuple[str, str]]:
    """(heading, text) of a rule's documentation; its first line has an empty heading."""
    first = documentation.strip().partition("\n")[0]
    return [("", first), *rule_docs.sections(documentation)]


def _table(answers: list[Answer]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Cause": [escape(CAUSES[rule.id].title) for rule, _ in answers],
            "Answer": [escape(verdict.reason) or "nothing of the kind" for _, verdict in answers],
        }
    )


def _documentation(answers: tuple[Answer, ...]) -> None:
    rules = {rule.id: rule for rule, _ in answers}
    found = next((r.id for r, v in answers if v.status is Status.FOUND), None)
    chosen = links.select(
        "Rule",
        "rule",
        list(rules),
        default=found,
        format_func=lambda id_: f"{CAUSES[id_].title} ({id_})",
        help="Type to search.",
    )
    st.markdown(f"*{escape(CAUSES[chosen].definition)}*")
    for heading, text in sections(rules[chosen].documentation):
        st.markdown(f"**{escape(heading)}**\n\n{escape(text)}" if heading else escape(text))
