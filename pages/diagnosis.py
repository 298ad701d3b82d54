"""Diagnosis: why a script fails under mixed precision, from verdict to measurement to fix."""

import streamlit as st

from app import diagnosis, states
from app.runs import diagnoses

case = diagnosis.open_case()
report = case.report
if report is None:
    st.stop()
baseline = diagnoses.observed(case.run_of("as_is") or case.head)
if not diagnosis.show_verdict(case, report, baseline):
    diagnosis.show_measurements(case, None)
    st.stop()
found = next(iter(report.diagnosis.findings), None)
if found is not None:
    with states.contained():
        diagnosis.show_fix(case, report)
    with states.contained():
        diagnosis.show_chain(report, baseline)
with states.contained():
    diagnosis.show_controls(case, report)
with states.contained():
    diagnosis.show_compiled(case)
if found is not None:
    with states.contained():
        diagnosis.show_evidence(case, report)
with states.contained():
    diagnosis.show_measurements(case, found.verdict.step if found is not None else None)
with states.contained():
    diagnosis.show_other_findings(report)
with states.contained():
    diagnosis.show_rules(report, case.head.id)
