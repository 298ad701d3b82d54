"""Diagnosis: why a script fails under mixed precision, from verdict to measurement to fix."""

import streamlit as st

from app import states
from app.diagnosis import (
    diagnosis_controls,
    diagnosis_data,
    diagnosis_evidence,
    diagnosis_fix,
    diagnosis_measurements,
    diagnosis_page,
    diagnosis_rules,
    diagnosis_view,
)

case = diagnosis_page.opened()
report = case.report
if report is None:
    st.stop()
as_is = diagnosis_data.view(case.run_of("as_is") or case.head)
if not diagnosis_view.verdict(case, report, as_is):
    diagnosis_measurements.show(case, None)
    st.stop()
found = next(iter(report.diagnosis.findings), None)
if found is not None:
    with states.part():
        diagnosis_view.chain(report, as_is)
    with states.part():
        diagnosis_fix.show(case, report)
with states.part():
    diagnosis_controls.show(case, report)
if found is not None:
    with states.part():
        diagnosis_evidence.show(case, found)
with states.part():
    diagnosis_measurements.show(case, found.verdict.step if found is not None else None)
with states.part():
    diagnosis_view.others(report)
with states.part():
    diagnosis_rules.show(report)
