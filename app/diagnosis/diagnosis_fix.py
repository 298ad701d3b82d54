"""The fix: what to change as a patch, what runs with it showed, and a button that runs it again."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.diagnose import Finding
from ampscope.errors import AmpscopeError
from ampscope.experiments.detached import folder_of
from ampscope.report import fix_words
from ampscope.report.words.controls import control
from ampscope.verdicts.report import Report
from app import layout, permissions
from app.diagnosis import diagnosis_jobs, diagnosis_page
from app.diagnosis.diagnosis_data import Case
from app.text import cut, escape


def show(case: Case, report: Report) -> None:
    """Of the root cause."""
    finding = report.diagnosis.findings[0]
    st.subheader("The fix", anchor=False)
    cured = fix_words.chosen(report)
    layout.see(fix_words.sentence(finding, cured))
    patch = fix_words.patch(finding, cured)
    if patch:
        st.code(patch, language="python")
    _proof(case, report, finding)
    _run(case, report, finding)
    _tried(report)


def _proof(case: Case, report: Report, finding: Finding) -> None:
    if report.trials:
        boxes = {True: st.success, False: st.warning, None: st.info}
        boxes[fix_words.verified(report)](escape(fix_words.seen(report)))
    elif case.head.spec.imported:
        st.info("No run with this fix came with the import.")
    elif finding.verdict.fix.controls:
        st.info("This fix has not been tried yet. The button below runs the script with it.")
    else:
        st.info(
            "ampscope cannot apply this fix to a running script. Change the script by hand, then "
            "diagnose it again:"
        )
        st.code(diagnosis_page.command(case.head), language="bash")


def _run(case: Case, report: Report, finding: Finding) -> None:
    if case.head.spec.imported:  # its file and arguments are a stranger's words
        st.caption("This diagnosis was imported. It can be looked at, and is not run from here.")
        return
    words = fix_words.candidates(report)
    if not words or not permissions.offers("running the fix"):
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = words[0]
        if len(words) > 1:
            chosen = st.selectbox("Run the script", words, format_func=control, key="dx-fix-word")
        again = any(t.control == chosen for t in report.trials)
        busy = diagnosis_jobs.busy_with()
        start = st.button(
            "Run the fix again" if again else "Run the fix",
            key="dx-run-fix",
            icon=":material/replay:" if again else ":material/play_arrow:",
            disabled=bool(busy) or case.is_moving,
        )
    folder = cut(str(folder_of(case.head.spec)), 60)
    text = f"It runs the script {control(chosen)}, in the folder {folder}."
    if busy and busy != case.script:
        text = f"{cut(busy, 60)} is being run; one at a time."
    elif case.is_moving:
        text = "The script is being run. What it shows will stand here when it has ended."
    st.caption(escape(text))
    if start:
        try:
            diagnosis_jobs.start_controls(case.head, _with_reference(chosen))
        except AmpscopeError as error:
            st.error(escape(str(error)))
        else:
            st.toast(escape(f"The script runs {control(chosen)}."))
            st.rerun()


def _with_reference(word: str) -> list[str]:
    """A lower learning rate is judged by fp32 at that rate too."""
    return [word, f"fp32;{word}"] if word.startswith("lr:") else [word]


def _tried(report: Report) -> None:
    if not report.trials:
        return
    with layout.details("What was tried, and seen"):
        rows = {
            "The script was run": [escape(control(t.control)) for t in report.trials],
            "Seen": [fix_words.outcome(t) for t in report.trials],
            "Time per step": [f"{t.price:.2f} times" if t.price else "" for t in report.trials],
            "Peak memory": [f"{t.memory:.2f} times" if t.memory else "" for t in report.trials],
        }
        st.table(pd.DataFrame(rows).set_index("The script was run"), border="horizontal")
        st.caption("Each of these runs is among the measurements below.")
