"""The diagnosis of a script that comes with a lesson: offered, followed, and shown on its page."""

from __future__ import annotations

import streamlit as st

from ampscope.control import BASELINE, Control
from ampscope.ext.lessons.mistakes import STEPS, Mistake, script_path
from ampscope.story import diagnosis as story
from ampscope.story import fix_words
from ampscope.story import verdict_words as diagnosis_words
from app import chart, links, permissions, render, store
from app.ext.lessons import lesson_page
from app.runs import diagnoses, run_page
from app.runs.diagnoses import DiagnosisCase
from app.text import duration, escape


def section(mistake: Mistake) -> None:
    """The same failure as a script of its own, and its diagnosis."""
    st.subheader("Diagnose it", anchor=False)
    chart.see(mistake.sentence)
    with chart.details("The script"):
        st.code(script_path(mistake.id).read_text(), language="python", wrap_lines=True)
    if case := diagnosed(mistake):
        found(case)


def newest(path: str) -> DiagnosisCase | None:
    """The newest diagnosis of the script that was made here.

    A lesson speaks of measurements of this machine: what a file brought may say anything, under any
    script's name. Nor does one count that was run with other arguments.
    """
    runs = [run for run in diagnoses.recorded_runs() if not run.spec.imported and not run.spec.args]
    head = next((h for h in diagnoses.group_heads(runs) if h.spec.workload == path), None)
    return None if head is None else diagnoses.read_case(head, runs)


def diagnosed(mistake: Mistake, *, is_fixed: bool = False) -> DiagnosisCase | None:
    """Offer the diagnosis of its script, or follow it; the one to show, with its report."""
    path = script_path(mistake.id, is_fixed=is_fixed)
    case = newest(str(path))
    problem = diagnoses.job_problem(str(path))
    if problem:
        st.error(escape(problem))
    is_moving = diagnoses.job_is_running(str(path)) or (case is not None and case.is_moving)
    if is_moving:
        _following(str(path), "" if case is None else diagnoses.data_version(case))
        return None
    done = case if case is not None and case.report is not None else None
    if not permissions.is_trusted():
        if not done:
            permissions.offers("diagnosing this script, which takes half a minute")
        return done
    busy = diagnoses.busy_with()
    label = "Diagnose again" if done else "Diagnose it"
    clicked = st.button(
        label, key=f"dx-{path.stem}", disabled=bool(busy),
        type="tertiary" if done else "primary",
        help="It runs the script several times, for about half a minute."
        + (" One diagnosis at a time." if busy else ""),
    )  # fmt: skip
    if clicked:
        diagnoses.start_diagnosis(path, mistake.policy, STEPS)
        st.rerun()
    return done


def found(case: DiagnosisCase) -> None:
    """What the diagnosis says, what to do, the losses."""
    assert case.report is not None
    baseline = diagnoses.observed(case.run_of(BASELINE) or case.head)
    chart.see(diagnosis_words.paragraph(case.report, baseline))
    st.markdown(f"**What to do.** {escape(diagnosis_words.next_step(case.report, baseline))}")
    finding = next(iter(case.report.diagnosis.findings), None)
    if finding is not None and finding.verdict.fix.patch:
        st.code(finding.verdict.fix.patch, language="python", wrap_lines=True)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.page_link(
            links.DIAGNOSIS.file, label="Open the diagnosis", icon=links.DIAGNOSIS.icon,
            query_params={"run": case.head.id},
        )  # fmt: skip
        took = duration(case.report.elapsed_s)
        how = run_page.policy_of(case.head)
        st.caption(escape(f"{how} · it took {took}"), width="content")
    _losses(case)


def _losses(case: DiagnosisCase) -> None:
    runs = {c: run for c in (BASELINE, "fp32") if (run := case.run_of(c)) is not None}
    recorded = [
        fix_words.ControlRun(Control(c).words, run, store.steps(run), store.totals(run))
        for c, run in runs.items()
    ]
    losses = story.control_losses([c for c in recorded if c.last_loss is not None])
    if losses is None:
        st.caption("No loss was recorded of its runs.")
        return
    lesson_page.show_chart(
        render.curves(losses),
        "lesson-diagnosis",
        render.values(losses),
        story.last_losses(recorded),
    )


@st.fragment(run_every=run_page.FOLLOW_EVERY_S)
def _following(path: str, version: str) -> None:
    case = newest(path)
    is_moving = diagnoses.job_is_running(path) or (case is not None and case.is_moving)
    if not is_moving or (case is not None and diagnoses.data_version(case) != version):
        st.rerun(scope="app")
    ended = 0 if case is None else sum(not run.state.is_active for run in case.runs)
    st.info(f"**Diagnosing on this machine.** {ended} of its runs have ended so far.",
            icon=":material/hourglass_top:")  # fmt: skip
