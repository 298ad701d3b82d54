"""SARIF 2.1.0: findings in the form that code scanning and editors read.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ampscope import __version__
from ampscope.causes import CAUSES

if TYPE_CHECKING:
    from ampscope.diagnosis.findings import Finding
    from ampscope.diagnosis.result import DiagnosisResult

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


@dataclass(frozen=True, slots=True)
class SarifRule:
    """What one code means."""

    code: str
    name: str
    title: str
    text: str
    help: str
    level: str  # error, warning, note


@dataclass(frozen=True, slots=True)
class Replacement:
    """A region of a file, lines and columns from 1, end exclusive, and its new text."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True, slots=True)
class SarifResult:
    """One finding at a place; ``line`` 0 stands for the file as a whole."""

    code: str
    level: str
    message: str
    path: str
    line: int = 0
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    fix: tuple[Replacement, ...] = ()


def log(
    rules: Iterable[SarifRule], results: Sequence[SarifResult], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The log of one run. ``notes`` name what could not be looked at."""
    listed = list(rules)
    index = {rule.code: n for n, rule in enumerate(listed)}
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "ampscope",
                "version": __version__,
                "semanticVersion": __version__,
                "rules": [_rule(rule) for rule in listed],
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": [_result(result, index) for result in results],
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    {"level": "warning", "message": {"text": note}} for note in notes
                ],
            }
        ],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def of_diagnosis(report: DiagnosisResult) -> str:
    """The findings as a SARIF 2.1.0 log, latent ones as warnings, each at its line of the script
    where one is known. What could not be judged is a notification."""
    found = [(f, "error") for f in report.diagnosis.findings]
    found += [(f, "warning") for f in report.diagnosis.latent]
    names = sorted({finding.cause for finding, _ in found})
    rules = [
        SarifRule(
            CAUSES[name].code,
            name,
            CAUSES[name].title,
            CAUSES[name].definition,
            f"ampscope explain {CAUSES[name].code}",
            "error",
        )
        for name in names
    ]
    results = [_place_of(finding, level, report) for finding, level in found]
    notes = [report.undecided] if report.undecided else []
    return json.dumps(log(rules, results, notes), indent=2)


def _place_of(finding: Finding, level: str, report: DiagnosisResult) -> SarifResult:
    """``verdict.line`` is "train.py:18", named from the script's folder."""
    file, _, number = finding.verdict.line.rpartition(":")
    script = Path(report.script)
    path = script.parent / file if file and number.isdecimal() else script
    shown = os.path.relpath(path) if path.is_absolute() else str(path)
    if shown.startswith(".."):
        shown = str(path)
    return SarifResult(
        CAUSES[finding.cause].code,
        level,
        finding.verdict.reason,
        shown,
        int(number) if number.isdecimal() else 0,
    )


def _rule(rule: SarifRule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": "".join(word.capitalize() for word in rule.name.split("_")),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.text},
        "help": {"text": rule.help},
        "defaultConfiguration": {"level": rule.level},
    }


def _result(result: SarifResult, index: dict[str, int]) -> dict[str, Any]:
    artifact = {"uri": quote(PurePath(result.path).as_posix())}
    if not PurePath(result.path).is_absolute():
        artifact["uriBaseId"] = "%SRCROOT%"
    else:
        artifact["uri"] = PurePath(result.path).as_uri()
    place: dict[str, Any] = {"artifactLocation": artifact}
    if result.line:
        region = {"startLine": result.line}
        if result.column:
            region |= {
                "startColumn": result.column,
                "endLine": result.end_line,
                "endColumn": result.end_column,
            }
        place["region"] = region
    found: dict[str, Any] = {
        "ruleId": result.code,
        "ruleIndex": index[result.code],
        "level": result.level,
        "message": {"text": result.message},
        "locations": [{"physicalLocation": place}],
    }
    if result.fix:
        replacements = [
            {
                "deletedRegion": {
                    "startLine": r.line,
                    "startColumn": r.column,
                    "endLine": r.end_line,
                    "endColumn": r.end_column,
                },
                "insertedContent": {"text": r.text},
            }
            for r in result.fix
        ]
        found["fixes"] = [
            {"artifactChanges": [{"artifactLocation": artifact, "replacements": replacements}]}
        ]
    return found
