"""What the runs with a fix showed, in words, and which fixes can be run again."""

from __future__ import annotations

from ampscope.experiments.report import Report
from ampscope.report.fix_words import best
from app.diagnosis_terms import control


def seen(report: Report) -> str:
    """What the runs with a fix showed."""
    cured = best(report)
    if cured is not None:
        price = f", at {cured.price:.2f} times the time a step" if cured.price else ""
        run = f"the script was run {control(cured.control)}"
        return f"Verified: {run}, and the symptom was gone{price}."
    tried = "; ".join(control(t.control) for t in report.trials)
    return f"No fix was seen to work. Tried: {tried}."


def candidates(report: Report) -> list[str]:
    """Controls to run again: the one that worked first, then what the rule names."""
    cured = best(report)
    words = [cured.control] if cured is not None else []
    return list(dict.fromkeys([*words, *report.diagnosis.findings[0].verdict.fix.controls]))
