"""A diagnosis as SARIF: its findings at their lines, and what could not be judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ampscope.diagnosis.findings import Diagnosis, Finding
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.ext.preflight.sarif import of_diagnosis
from ampscope.rules.verdict import Fix, Status, Verdict
from tests.helpers.sarif_schema import check_log


def made(status: Status, line: str, cause: str = "activation_overflow") -> Finding:
    verdict = Verdict(status, "aten.mm gave infinity.", fix=Fix("none", ""), line=line)
    return Finding(cause, verdict)


def of(diagnosis: Diagnosis, script: Path, reason: str = "") -> dict[str, object]:
    log = json.loads(of_diagnosis(DiagnosisResult(str(script), diagnosis, {}, (), 1.0, reason)))
    check_log(log)
    (run,) = log["runs"]
    return run


def test_findings_are_errors_at_their_line_and_latent_ones_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = made(Status.FOUND, "nets/block.py:18")
    latent = made(Status.LATENT, "", "gradient_underflow")
    run = of(Diagnosis("fault", (found,), (), (), "native", latent=(latent,)), tmp_path / "t.py")
    seen = [
        (r["level"], r["ruleId"], r["locations"][0]["physicalLocation"]) for r in run["results"]
    ]
    here = {"uriBaseId": "%SRCROOT%"}
    assert seen == [
        (
            "error",
            "AMP001",
            {
                "artifactLocation": {"uri": "nets/block.py", **here},
                "region": {"startLine": 18},
            },
        ),
        ("warning", "AMP012", {"artifactLocation": {"uri": "t.py", **here}}),
    ]


def test_what_could_not_be_judged_is_a_notification(tmp_path: Path) -> None:
    nothing = Diagnosis("inconclusive", (), (), (), "native")
    run = of(nothing, tmp_path / "t.py", "There is no file t.py.")
    assert run["results"] == []
    (notification,) = run["invocations"][0]["toolExecutionNotifications"]
    assert "There is no file t.py." in notification["message"]["text"]
