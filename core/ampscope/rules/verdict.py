"""What a rule is and what it answers.

A rule file holds a docstring under fixed headings (What it detects, Why it matters, Blind spots,

Remedy), which the dashboard shows, one function ``check`` and one constant ``RULE``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from ampscope.analysis.evidence import Evidence


class Status(StrEnum):
    """Answer of one rule."""

    PASSED = "passed"
    FOUND = "found"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not_applicable"
    ERRORED = "errored"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number (or word) behind a verdict, and where it was measured."""

    name: str
    value: float | str
    threshold: float | str | None = None
    run: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """What to change. ``controls`` are the interventions that try it, best first."""

    kind: str
    text: str
    patch: str = ""
    controls: tuple[str, ...] = ()
    framework: str = "torch"  # whose code the patch is


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule's answer; the fields below ``reason`` are filled when the cause was found."""

    status: Status
    reason: str = ""
    module: str | None = None
    op: str | None = None
    phase: str | None = None
    step: int | None = None
    line: str = ""
    code: str = ""
    severity: str = "error"
    evidence: tuple[Measurement, ...] = ()
    fix: Fix = field(default_factory=lambda: Fix("none", ""))


@dataclass(frozen=True, slots=True)
class Rule:
    """A root cause's rule. ``explains`` are causes that are its consequences when both are found;
    ``order`` ranks findings that are not consequences of each other (smaller is nearer the root).
    ``needs_ops``: it looks at single ops or calls, which are recorded of PyTorch alone; a rule that
    does not need them judges steps and layers of any framework.
    """

    id: str
    check: Callable[[Evidence], Verdict]
    needs: tuple[str, ...]
    order: int
    explains: tuple[str, ...] = ()
    needs_ops: bool = True
    documentation: str = ""


def passed(reason: str = "") -> Verdict:
    """The cause was looked for and is not there."""
    return Verdict(Status.PASSED, reason)


def not_applicable(reason: str) -> Verdict:
    """The script has nothing that the cause could concern."""
    return Verdict(Status.NOT_APPLICABLE, reason)


def inconclusive(reason: str) -> Verdict:
    """What was recorded cannot decide."""
    return Verdict(Status.INCONCLUSIVE, reason)
