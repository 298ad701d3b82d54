"""Sentences of the Zoo page."""

from __future__ import annotations

from collections.abc import Sequence

from app.layout import KeyFigure
from app.text import plural, share
from app.zoo.zoo_data import NO_FAULT, Result, Row, Stage, title


def answer(rows: Sequence[Row]) -> str:
    """How the diagnoses so far compare with what was expected."""
    done = [r for r in rows if r.faulty.stage is Stage.DONE]
    if not done:
        return f"{plural(len(rows), 'real failure')}, none of them diagnosed on this machine yet."
    right = sum(r.is_right for r in done)
    return (
        f"{len(done)} of {plural(len(rows), 'case')} diagnosed; the expected cause came first in "
        f"{right} of {len(done)}."
    )


def figures(rows: Sequence[Row], healthy: Sequence[Result]) -> list[KeyFigure]:
    """Each with its base, and a word where there is none yet."""
    done = [r for r in rows if r.faulty.stage is Stage.DONE]
    modules = [r for r in done if r.is_module_right is not None]
    fixes = [r for r in done if r.answer.appliable]
    twins = [t for r in rows if (t := r.twin) is not None] + list(healthy)
    judged = [t for t in twins if t.stage is Stage.DONE]
    return [
        KeyFigure(
            "Expected cause first",
            _part(sum(r.is_right for r in done), len(done)),
            "Of the cases that were diagnosed",
        ),
        KeyFigure(
            "Right module",
            _part(sum(bool(r.is_module_right) for r in modules), len(modules)),
            "Of those that have a module to blame",
        ),
        KeyFigure(
            "Fix seen to work",
            _part(sum(bool(r.faulty.cured) for r in fixes), len(fixes)),
            "Of those whose fix ampscope can apply by itself",
        ),
        KeyFigure(
            "False alarms",
            _part(sum(t.found != NO_FAULT for t in judged), len(judged)),
            "Healthy scripts in which a fault was named",
        ),
    ]


def faulty_result(row: Row) -> str:
    """Found beside expected, in one line."""
    result = row.faulty
    if result.stage is not Stage.DONE:
        return _unfinished(result)
    module = f" in {result.module}" if result.module else ""
    judged = "as expected" if row.is_right else f"expected: {title(row.answer.cause)}"
    if not row.is_right and result.found in row.answer.accept:
        judged = f"accepted too; {judged}"
    if row.is_module_right is False:
        judged += f", in {row.answer.module}"
    fix = {True: " Fix seen to work.", False: " No fix worked.", None: ""}[result.cured]
    return f"Found: {title(result.found)}{module} ({judged}).{fix}"


def healthy_result(result: Result) -> str:
    """A healthy script's verdict."""
    if result.stage is not Stage.DONE:
        return _unfinished(result)
    if result.found == NO_FAULT:
        return "Found: no fault (as expected)."
    return f"False alarm: {title(result.found)}."


def _unfinished(result: Result) -> str:
    text = result.stage.capitalize()
    return f"{text}: {result.problem}" if result.problem else f"{text}."


def _part(part: int, whole: int) -> str:
    return share(part, whole).partition(",")[0] if whole else "none yet"
