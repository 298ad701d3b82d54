"""A diagnosis as JSON, contract version 1. Non-finite numbers are the strings nan, inf and -inf."""

from __future__ import annotations

import dataclasses
from typing import Any

from ampscope.causes import CAUSES
from ampscope.control import BASELINE
from ampscope.diagnosis.findings import Finding
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.record_json import dumps
from ampscope.records import RunInfo
from ampscope.rules.verdict import Measurement
from ampscope.story import fix_words, verdict_words
from ampscope.story.run_words import rules

SCHEMA = 1


def to_json(report: DiagnosisResult) -> str:
    """The document, indented."""
    return dumps(document(report), indent=2)


def document(report: DiagnosisResult) -> dict[str, Any]:
    """The document as plain values."""
    diagnosis = report.diagnosis
    return {
        "schema": SCHEMA,
        "script": report.script,
        "verdict": "inconclusive" if report.could_not_run else diagnosis.verdict,
        "reason": report.undecided,
        "scope": {  # of the verdict: how much of the script it is about
            "steps": report.judged_steps,
            "whole_script": not report.cut_short,
            "stopped_by": report.cut_short or None,
            "sentence": report.scope,
        },
        "lead": _lead(report),
        "precision": _precision(report),
        # Where numbers became half precision, from the script's first line on.
        "sites": [{**dataclasses.asdict(s), "names": list(s.names)} for s in report.sites],
        "policy": diagnosis.policy,
        "rules": rules(head) if (head := report.runs.get(BASELINE)) else None,
        "elapsed_s": round(report.elapsed_s, 2),
        "findings": [_finding(f, report, first=n == 0) for n, f in enumerate(diagnosis.findings)],
        # Numbers that are being lost, without harm so far; they do not change the verdict.
        "latent": [_finding(f, report, first=False) for f in diagnosis.latent],
        "symptoms": list(diagnosis.symptoms),
        "controls": {name: _control(report, name) for name in ("fp32", "bf16")},
        "tried": [
            {
                "control": t.control,
                "kind": t.kind,
                "cured": t.cured,
                "run": _run(report.runs, t.control),
            }
            for t in report.trials
        ],
        # Runs with torch.compile on, beside the eager one: each leaves out a layer of the compiler.
        "compiled": [
            {"control": c.control, "through": c.through, "said": c.words} for c in report.compiled
        ],
        "runs": {name: info.id for name, info in report.runs.items()},
        "notes": list(report.notes),
    }


def _finding(finding: Finding, report: DiagnosisResult, *, first: bool) -> dict[str, Any]:
    verdict, runs = finding.verdict, report.runs
    trials = report.trials if first else ()  # fixes are run for the root cause alone
    cured = fix_words.best(report) if first else None
    shown = fix_words.chosen(report) if first else None
    cost = None
    if cured is not None:
        # Ratios to the baseline; of processor time, because the runs share the machine unequally.
        cost = {"step_time_ratio": cured.price, "peak_memory_ratio": cured.memory}
    fix: dict[str, Any] = {
        "kind": shown.kind if shown else verdict.fix.kind,
        "text": fix_words.sentence(finding, shown),
        "patch": fix_words.patch(finding, shown),
        # true: a symptom went away and the loss follows the control. false: no fix that was run
        # did that. null: none was run, or the pattern is gone and an effect is not measurable, or
        # too few steps were run to tell.
        "verified": fix_words.verified(report) if first else None,
        "verification": fix_words.seen(report) if trials else "",
        "cost": cost,
        "control": shown.control if shown else None,
    }
    return {
        "cause": finding.cause,
        "code": CAUSES[finding.cause].code,
        "severity": verdict.severity,
        "module": verdict.module,
        "op": verdict.op,
        "phase": verdict.phase,
        "step": verdict.step,
        "line": verdict.line or None,
        "rank": report.rank,  # null of a script that trains in one process
        "explanation": verdict.reason,
        "evidence": [_measurement(m, runs) for m in verdict.evidence],
        "fix": fix,
        "consequences": [_finding(c, report, first=False) for c in finding.consequences],
    }


def _lead(report: DiagnosisResult) -> dict[str, Any] | None:
    """Where to look when the verdict is undetermined."""
    if not report.undecided or report.lead is None:
        return None
    found = report.lead
    names = ("op", "module", "phase", "line")
    return {
        "what": found.what,
        **{name: getattr(found, name) or None for name in names},
        "step": found.step,
    }


def _precision(report: DiagnosisResult) -> dict[str, Any] | None:
    """What ran in which precision; None of a script that never ran. ``half_share`` is null where no
    FLOPs were recorded."""
    use = report.precision
    if use is None or not use.steps:
        return None
    return {
        "headline": verdict_words.precision_headline(use),
        "flops": dict(use.flops),
        "half_share": use.half_share,
        "half_used": not use.no_half if use.is_recorded else None,
        "why_no_half": verdict_words.why_none(use) if use.no_half else "",
        "judged_steps": use.steps,
        "compared_steps": use.compared,
        "not_judged": list(use.not_judged),  # ops that the control computes in the same fp8, int8
    }


def _measurement(measurement: Measurement, runs: dict[str, RunInfo]) -> dict[str, Any]:
    return {
        "name": measurement.name,
        "value": measurement.value,
        "threshold": measurement.threshold,
        "run": _run(runs, measurement.run) or measurement.run,
        "step": measurement.step,
    }


def _control(report: DiagnosisResult, name: str) -> dict[str, Any]:
    symptoms = report.control_symptoms.get(name)
    if symptoms is None:
        return {"ok": None}
    return {"ok": not symptoms, "symptoms": list(symptoms), "run": _run(report.runs, name)}


def _run(runs: dict[str, RunInfo], control: str) -> str:
    return runs[control].id if control in runs else ""
