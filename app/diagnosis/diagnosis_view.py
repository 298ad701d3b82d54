"""Sections of the Diagnosis page: the verdict and the chain from the cause to the symptom."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.analysis.run_view import RunView
from ampscope.causes import CAUSES
from ampscope.diagnose import Finding
from ampscope.report import fix_words
from ampscope.report.words import verdict as words
from ampscope.report.words.chain import Link
from ampscope.report.words.chain import chain as chain_of
from ampscope.verdicts.report import Report
from app import chart, layout
from app.diagnosis import diagnosis_page
from app.diagnosis.diagnosis_data import Case
from app.figures.cause_chain import cause_chain
from app.layout import KeyFigure
from app.text import cut, escape

METRIC_LENGTH = 18


def verdict(case: Case, report: Report, as_is: RunView) -> bool:
    """The answer, a paragraph, and what to do now. False when there was nothing to judge."""
    layout.sentence(words.verdict(report, as_is))
    if headline := words.headline(report):
        layout.see(headline)
    layout.see(words.paragraph(report, as_is))
    problem = words.could_not_run(report, as_is)
    findings = report.diagnosis.findings
    next_step = words.next_step(report, as_is)
    if findings and not problem and findings[0].verdict.code:
        st.code(findings[0].verdict.code, language="python", wrap_lines=True)
    st.markdown(f"**What to do.** {escape(next_step)}")
    if problem or not findings:
        if next_step.endswith(":") and not case.head.spec.imported:
            command = diagnosis_page.command(case.head, words.options(report, as_is))
            st.code(command, language="bash")
    else:
        layout.key_figures(_figures(report, findings[0]))
    _error(case, as_is)
    return not problem


def chain(report: Report, as_is: RunView) -> None:
    """From root cause to symptom."""
    finding = report.diagnosis.findings[0]
    st.subheader("From the cause to what you see", anchor=False)
    found = chain_of(finding, as_is, report.diagnosis.symptoms)
    is_dark = st.context.theme.type == "dark"
    chart.show(cause_chain(found, is_dark=is_dark), "chain", lambda: _table(found), key="dx-chain")


def others(report: Report) -> None:
    """Further causes that were found beside the first."""
    for finding in report.diagnosis.findings[1:]:
        with layout.details(f"Also found: {escape(CAUSES[finding.cause].title)}"):
            layout.see(finding.verdict.reason)
            if finding.verdict.fix.text:
                st.markdown(f"**What to do.** {escape(finding.verdict.fix.text)}")
            if finding.verdict.fix.patch:
                st.code(finding.verdict.fix.patch, language="python")


def _figures(report: Report, finding: Finding) -> list[KeyFigure]:
    found = finding.verdict
    place = found.module or found.line or "the whole script"
    fp32 = report.control_symptoms.get("fp32")
    return [
        KeyFigure("Where", cut(place, METRIC_LENGTH), f"{place}; {found.op or 'no single op'}"),
        KeyFigure(
            "First seen at",
            "no step" if found.step is None else f"step {found.step:,}",
            "Optimizer steps that were attempted count from 0",
        ),
        KeyFigure("Fix", *_fix_state(report)),
        KeyFigure(
            "In fp32",
            words.in_fp32(report),
            "; ".join(fp32 or ()) or "The same script with autocast and the scaler off",
        ),
    ]


def _fix_state(report: Report) -> tuple[str, str]:
    details = {
        "seen to work": "A run with the fix did not show the symptom, and its loss follows fp32's",
        "none worked": "Each run with a fix still showed the symptom, or the cause",
        "not measurable": "The pattern is removed; the script showed no symptom, or too few steps",
        "not tried": "No run with a fix has been made",
    }
    state = fix_words.state(report)
    return state, details[state]


def _error(case: Case, as_is: RunView) -> None:
    """The script's own exception, whole."""
    outcome = as_is.outcome
    if outcome.error_text or case.head.traceback:
        title = "The script's own error" if outcome.error_text else "Where it stood"
        with layout.details(title):
            text = case.head.traceback or f"{outcome.error_type}: {outcome.error_text}"
            st.code(text, language=None, wrap_lines=True)


def _table(links: list[Link]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "place": range(1, len(links) + 1),
            "what": [link.title for link in links],
            "detail": [link.detail for link in links],
            "step": [link.step for link in links],
        }
    )
