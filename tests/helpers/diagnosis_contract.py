"""The JSON contract of a diagnosis, version 1, written out by hand as a checker.

It knows nothing of how ampscope makes the document; the names of causes and fix kinds are the
closed lists that the contract refers to.
"""

from __future__ import annotations

import json
from typing import Any

from ampscope.causes import CAUSES
from ampscope.rules.verdict import FIX_KINDS

NUMBER = (int, float)
EXIT_STATUS = {"no_fault": 0, "fault": 1, "inconclusive": 2}


def checked(text: str, *, one_step: bool = False) -> dict[str, Any]:
    """The document, which must be strict JSON and nothing else. Raises AssertionError. Of a run of
    ``one_step`` no time is known: the first step is left out of it, as it also loads."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    _has(document, "schema", int)
    assert document["schema"] == 1
    assert document["verdict"] in EXIT_STATUS
    _has(document, "elapsed_s", NUMBER)
    _scope(document)
    _has(document, "findings", list)
    assert bool(document["findings"]) == (document["verdict"] == "fault")
    for number, finding in enumerate(document["findings"]):
        _finding(finding, document["runs"], verifiable=number == 0)
        if finding["fix"]["verified"]:
            time = finding["fix"]["cost"]["step_time_ratio"]
            assert time is None if one_step else time > 0
    for finding in document.get("latent", ()):  # version 1 got it later
        _finding(finding, document["runs"], verifiable=False)
    _has(document, "controls", dict)
    for name in ("fp32", "bf16"):
        assert document["controls"][name]["ok"] in (True, False, None)
    if document["verdict"] == "inconclusive":
        assert document.get("reason") or document.get("symptoms")
    return document


def _scope(document: dict[str, Any]) -> None:
    """A field that version 1 got later; programs that do not know it read on as before."""
    scope = document.get("scope")
    if scope is None:
        return
    _has(scope, "steps", int)
    assert scope["whole_script"] == (scope["stopped_by"] is None)
    assert scope["stopped_by"] in (None, "steps", "time")
    if scope["sentence"]:
        assert document["verdict"] == "no_fault"
        assert f"{scope['steps']:,}" in scope["sentence"]


def _finding(finding: dict[str, Any], runs: dict[str, str], *, verifiable: bool) -> None:
    assert finding["cause"] in CAUSES
    assert finding["severity"] in ("error", "warning", "info")
    for name in ("module", "op", "phase"):
        assert finding[name] is None or isinstance(finding[name], str)
    assert finding["step"] is None or isinstance(finding["step"], int)
    _has(finding, "explanation", str)
    assert finding["explanation"]
    for measured in finding["evidence"]:
        _has(measured, "name", str)
        _has(measured, "run", str)
        assert measured["run"] in runs.values()
        for key in ("value", "threshold"):
            assert measured[key] is None or isinstance(measured[key], (*NUMBER, str))
        assert measured["step"] is None or isinstance(measured["step"], int)
    fix = finding["fix"]
    assert fix["kind"] in FIX_KINDS
    _has(fix, "text", str)
    assert fix["verified"] in (True, False, None)
    assert verifiable or fix["verified"] is None
    if fix["verified"]:
        assert fix["cost"]["peak_memory_ratio"] > 0
    for consequence in finding.get("consequences", ()):
        _finding(consequence, runs, verifiable=False)


def _has(part: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> None:
    assert isinstance(part[name], kind), (name, part[name])
    assert not isinstance(part[name], bool)
