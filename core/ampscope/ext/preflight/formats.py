"""Preflight's findings as text, JSON, SARIF and JUnit XML."""

from __future__ import annotations

import json
from typing import Any

from ampscope.ext.preflight import junit, sarif
from ampscope.ext.preflight.checks import Result
from ampscope.ext.preflight.codes import CODES, LIST_VERSION
from ampscope.ext.preflight.finding import Edit, SourceFinding
from ampscope.ext.preflight.source import SourceFile

FORMATS = ("text", "json", "sarif", "junit")


def written(result: Result, form: str) -> str:
    """The result in one of :data:`FORMATS`, without a last line end."""
    return {"text": _text, "json": _json, "sarif": _sarif, "junit": _junit}[form](result)


def _text(result: Result) -> str:
    lines = [
        f"{_where(f)}: {f.code.code} {f.code.level}: {f.message}"
        + (" [repair: --fix]" if f.edits else "")
        for f in result.findings
    ]
    files = len(result.sources)
    looked = f"{files} file{'s' if files != 1 else ''}"
    if result.unread:
        looked += f"; {len(result.unread)} left out"
    if not result.findings:
        return f"No findings in {looked}."
    number = len(result.findings)
    lines.append(f"{number} finding{'s' if number != 1 else ''} in {looked}.")
    return "\n".join(lines)


def _where(finding: SourceFinding) -> str:
    """What a run found has no column, and perhaps no line."""
    parts = [finding.path, *(str(n) for n in (finding.line, finding.column) if n)]
    return ":".join(parts)


def _json(result: Result) -> str:
    document: dict[str, Any] = {
        "schema": 1,
        "codes": LIST_VERSION,
        "files": len(result.sources),
        "unread": result.unread,
        "findings": [
            {
                "code": f.code.code,
                "name": f.code.name,
                "level": f.code.level,
                "path": f.path,
                "line": f.line,
                "column": f.column,
                "end_line": f.end_line,
                "end_column": f.end_column,
                "message": f.message,
                "repair": bool(f.edits),
            }
            for f in result.findings
        ],
    }
    return json.dumps(document, indent=2)


def _sarif(result: Result) -> str:
    rules = [
        sarif.SarifRule(c.code, c.name, c.title, c.evidence, c.remedy, c.level)
        for c in (
            {f.code.code: f.code for f in result.findings} | {c.code: c for c in CODES.values()}
        ).values()
    ]
    results = [
        sarif.SarifResult(
            f.code.code, f.code.level, f.message, f.path, f.line, f.column, f.end_line,
            f.end_column, tuple(_replacement(result.sources[f.path], e) for e in f.edits),
        )
        for f in result.findings
    ]  # fmt: skip
    return json.dumps(sarif.log(rules, results, result.unread), indent=2)


def _replacement(source: SourceFile, edit: Edit) -> sarif.Replacement:
    return sarif.Replacement(*_place(source, edit.start), *_place(source, edit.end), edit.new)


def _place(source: SourceFile, offset: int) -> tuple[int, int]:
    """Line and column, from 1, of an offset."""
    line = source.text.count("\n", 0, offset)
    return line + 1, offset - (source.text.rfind("\n", 0, offset) + 1) + 1


def _junit(result: Result) -> str:
    """One test case per file; a finding is a failure, a file that cannot be read an error."""
    by_file: dict[str, list[SourceFinding]] = {path: [] for path in result.sources}
    for f in result.findings:
        by_file.setdefault(f.path, []).append(f)
    cases = []
    for path, found in by_file.items():
        if not found:
            cases.append(junit.TestCase(path))
            continue
        said = "\n".join(f"{_where(f)}: {f.code.code} {f.message}" for f in found)
        first = f"{found[0].code.code} line {found[0].line}: {found[0].message}"
        cases.append(junit.TestCase(path, "failure", first, said))
    cases += [junit.TestCase("unread", "error", note) for note in result.unread]
    return junit.document("ampscope preflight", "preflight", cases)
