"""A verdict from the exception that the script itself raised."""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.rules.verdict import Fix, Measurement, Status, Verdict


def error_verdict(evidence: Evidence, fix: Fix, reason: str = "") -> Verdict:
    """Found: the exception's own words are the evidence."""
    run = evidence.as_is
    outcome = run.outcome
    text = outcome.error_text.strip().splitlines()[0][:300] if outcome.error_text else ""
    step, again = outcome.attempts, ""
    if outcome.errors_caught:
        step = outcome.error_attempt
        again = f" The script caught it and went on, {outcome.errors_caught:,} times in all."
    return Verdict(
        Status.FOUND,
        reason or f"Line {outcome.error_line} raised {outcome.error_type}: {text}{again}",
        module=outcome.error_module or None,
        phase="forward" if outcome.error_module else None,
        step=step,
        line=outcome.error_line,
        evidence=(
            Measurement(outcome.error_type, text, run="as_is", step=step),
            Measurement(
                "fp32 control raises", str(bool(evidence.fp32 and evidence.fp32.has_exception))
            ),
        ),
        fix=fix,
    )
