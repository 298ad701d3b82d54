"""The fix: what to change as a patch, what runs with it showed, and a button that runs it again."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.diagnose import Finding
from ampscope.errors import AmpscopeError
from ampscope.experiments.cure import Trial
from ampscope.experiments.detached import folder_of
from ampscope.experiments.diagnosis import Report
from ampscope.report.contract import best_trial
from ampscope.rules.wording import island_patch
from app import diagnosis_jobs, diagnosis_page, diagnosis_words, layout
from app.diagnosis_data import Case
from app.text import cut, escape


def show(case: Case, report: Report) -> None:
    """Of the root cause."""
    finding = report.diagnosis.findings[0]
    st.subheader("The fix", anchor=False)
    cured = best_trial(report.trials)
    layout.see(diagnosis_words.fix_sentence(finding, cured))
    patch = patch_of(finding, cured)
    if patch:
        st.code(patch, language="python")
    _proof(case, report, finding)
    _run(case, report, finding)
    _tried(report)


def patch_of(finding: Finding, cured: Trial | None) -> str:
    """Code to paste: for the modules that were seen to matter, else as the rule wrote it."""
    fix = finding.verdict.fix
    word, _, names = cured.control.partition(":") if cured is not None else ("", "", "")
    if word == "lr":
        return f'for group in optimizer.param_groups:\n    group["lr"] *= {names}\n'
    if cured is None or cured.kind == fix.kind:
        own = not names or word != "fp32_modules" or names == (finding.verdict.module or "")
        if own:
            return fix.patch
    if word == "fp32_modules":
        return "\n".join(island_patch(name) for name in names.split(","))
    if word == "bf16":
        return "with torch.autocast(device_type, dtype=torch.bfloat16):\n    ...  # no GradScaler\n"
    return fix.patch


def candidates(report: Report, finding: Finding) -> list[str]:
    """Controls that the button offers: the one that worked first, then what the rule names."""
    cured = best_trial(report.trials)
    words = ([cured.control] if cured is not None else []) + list(finding.verdict.fix.controls)
    return list(dict.fromkeys(words))


def _proof(case: Case, report: Report, finding: Finding) -> None:
    if report.trials:
        box = st.success if best_trial(report.trials) is not None else st.warning
        box(escape(diagnosis_words.seen_sentence(report.trials)))
    elif finding.verdict.fix.controls:
        st.info("This fix has not been tried yet. The button below runs the script with it.")
    else:
        st.info(
            "ampscope cannot apply this fix to a running script. Change the script by hand, then "
            "diagnose it again:"
        )
        st.code(diagnosis_page.command(case.head), language="bash")


def _run(case: Case, report: Report, finding: Finding) -> None:
    words = candidates(report, finding)
    if not words:
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = words[0]
        if len(words) > 1:
            chosen = st.selectbox(
                "Run the script", words, format_func=diagnosis_words.control, key="dx-fix-word"
            )
        again = any(t.control == chosen for t in report.trials)
        busy = diagnosis_jobs.busy_with()
        start = st.button(
            "Run the fix again" if again else "Run the fix",
            key="dx-run-fix",
            icon=":material/replay:" if again else ":material/play_arrow:",
            disabled=bool(busy) or case.is_moving,
        )
    folder = cut(str(folder_of(case.head.spec)), 60)
    text = f"It runs the script {diagnosis_words.control(chosen)}, in the folder {folder}."
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
            st.toast(escape(f"The script runs {diagnosis_words.control(chosen)}."))
            st.rerun()


def _with_reference(word: str) -> list[str]:
    """A lower learning rate is judged by fp32 at that rate too."""
    return [word, f"fp32;{word}"] if word.startswith("lr:") else [word]


def _tried(report: Report) -> None:
    if not report.trials:
        return
    with layout.details("What was tried, and seen"):
        rows = {
            "The script was run": [
                escape(diagnosis_words.control(t.control)) for t in report.trials
            ],
            "Seen": ["cured" if t.cured else "not cured" for t in report.trials],
            "Time a step": [f"{t.price:.2f} times" if t.price else "" for t in report.trials],
        }
        st.table(pd.DataFrame(rows).set_index("The script was run"), border="horizontal")
        st.caption("Each of these runs is among the measurements below.")
