"""Preflight's findings as text, JSON, SARIF and JUnit XML."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from ampscope import sarif
from ampscope.preflight.checks import Finding, Result
from ampscope.preflight.codes import CODES, LIST_VERSION
from ampscope.preflight.source import Source
from ampscope.preflight.spelling import Edit

FORMATS = ("text", "json", "sarif", "junit")


def written(result: Result, form: str) -> str:
    """The result in one of :data:`FORMATS`, without a last line end."""
    return {"text": _text, "json": _json, "sarif": _sarif, "junit": _junit}[form](result)


def _text(result: Result) -> str:
    lines = [
        f"{f.path}:{f.line}:{f.column}: {f.code.code} {f.code.level}: {f.message}"
        + (" [repair: --fix]" if f.edits else "")
        for f in result.findings
    ]
    files = len(result.sources)
    looked = f"{files} file{'s' if files != 1 else ''}"
    if not result.findings:
        return f"No findings in {looked}."
    number = len(result.findings)
    lines.append(f"{number} finding{'s' if number != 1 else ''} in {looked}.")
    return "\n".join(lines)


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
        sarif.Rule(c.code, c.name, c.title, c.evidence, c.remedy, c.level) for c in CODES.values()
    ]
    results = [
        sarif.SarifResult(
            f.code.code, f.code.level, f.message, f.path, f.line, f.column, f.end_line,
            f.end_column, tuple(_replacement(result.sources[f.path], e) for e in f.edits),
        )
        for f in result.findings
    ]  # fmt: skip
    return json.dumps(sarif.log(rules, results, result.unread), indent=2)


def _replacement(source: Source, edit: Edit) -> sarif.Replacement:
    return sarif.Replacement(*_place(source, edit.start), *_place(source, edit.end), edit.new)


def _place(source: Source, offset: int) -> tuple[int, int]:
    """Line and column, from 1, of an offset."""
    line = source.text.count("\n", 0, offset)
    return line + 1, offset - (source.text.rfind("\n", 0, offset) + 1) + 1


def _junit(result: Result) -> str:
    """One test case per file; a finding is a failure, a file that cannot be read an error."""
    by_file: dict[str, list[Finding]] = {path: [] for path in result.sources}
    for f in result.findings:
        by_file[f.path].append(f)
    counts = Counter(bool(found) for found in by_file.values())
    head = (
        f'<testsuite name="ampscope preflight" tests="{len(by_file) + len(result.unread)}" '
        f'failures="{counts[True]}" errors="{len(result.unread)}" skipped="0">'
    )
    lines = ['<?xml version="1.0" encoding="utf-8"?>', "<testsuites>", head]
    for path, found in by_file.items():
        case = f'<testcase classname="preflight" name={quoteattr(_clean(path))}'
        if not found:
            lines.append(f"{case}/>")
            continue
        lines.append(f"{case}>")
        said = "\n".join(f"{f.path}:{f.line}: {f.code.code} {f.message}" for f in found)
        first = f"{found[0].code.code} line {found[0].line}: {found[0].message}"
        lines.append(
            f"<failure message={quoteattr(_clean(first))}>{escape(_clean(said))}</failure>"
        )
        lines.append("</testcase>")
    lines += [
        '<testcase classname="preflight" name="unread">'
        f"<error message={quoteattr(_clean(note))}/></testcase>"
        for note in result.unread
    ]
    return "\n".join([*lines, "</testsuite>", "</testsuites>"])


def _clean(text: str) -> str:
    """Without characters that XML cannot hold."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
