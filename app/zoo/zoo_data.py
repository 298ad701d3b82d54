"""The zoo's cases, and for each of its scripts what the newest diagnosis in the store says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath

from ampscope.causes import CAUSES
from ampscope.errors import AmpscopeError
from ampscope.records import AS_IS, RunInfo
from ampscope.report import fix_words
from ampscope.report.words.verdict import could_not_run
from ampscope.zoo.answers import ANSWERS, HEALTHY, Answer
from ampscope.zoo.score import script_path
from app.diagnosis import diagnosis_data, diagnosis_jobs
from app.diagnosis.diagnosis_data import Case

NO_FAULT = "no_fault"
_FOLDER = ("zoo", "scripts")  # a store may come from another place where ampscope is installed


class Stage(StrEnum):
    """How far one script's diagnosis is."""

    NOT_YET = "not diagnosed yet"
    RUNNING = "being diagnosed"
    DONE = "diagnosed"
    COULD_NOT_RUN = "could not be diagnosed"


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of one script. ``found`` is a cause, no_fault or inconclusive."""

    script: str
    stage: Stage
    head: RunInfo | None = None
    found: str = ""
    module: str | None = None
    cured: bool | None = None  # None when no fix was run, or its effect cannot be measured
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One case: the script with the fault, and its healthy twin."""

    answer: Answer
    faulty: Result
    twin: Result | None

    @property
    def is_right(self) -> bool:
        """The first finding is the cause that the answer key has."""
        return self.faulty.found == self.answer.cause

    @property
    def is_module_right(self) -> bool | None:
        """None for a case that has no module to blame."""
        return None if self.answer.module is None else self.faulty.module == self.answer.module


def rows() -> list[Row]:
    """Every case in the order of the answers."""
    read = _Diagnoses()
    return [Row(a, read.result(a.script), read.result(a.twin) if a.twin else None) for a in ANSWERS]


def healthy() -> list[Result]:
    """Further scripts without a fault, which have no faulty twin."""
    read = _Diagnoses()
    return [read.result(name) for name in HEALTHY]


def policy_of(script: str) -> str:
    """Under whose autocast rules the script's fault shows: native or cuda."""
    answer = next((a for a in ANSWERS if script in (a.script, a.twin)), None)
    return "cuda" if answer is not None and answer.policy == "cuda" else "native"


def title(cause: str) -> str:
    """A cause, or the verdict that stands in its place, in words."""
    if cause == "inconclusive":
        return "Undetermined"
    return CAUSES[cause].title if cause in CAUSES else cause


class _Diagnoses:
    """One look at the store for all scripts."""

    def __init__(self) -> None:
        # What a file brought may say anything, under any script's name.
        self.runs = [run for run in diagnosis_data.runs() if not run.spec.imported]
        self.groups: dict[str, list[RunInfo]] = {}
        for run in self.runs:
            self.groups.setdefault(run.spec.group, []).append(run)
        self.newest: dict[str, RunInfo] = {}
        heads = diagnosis_data.heads(self.runs)
        for head in (h for h in heads if h.spec.control == AS_IS):
            self.newest.setdefault(_zoo_name(head.spec.workload), head)

    def result(self, script: str) -> Result:
        head = self.newest.get(script)
        if head is None:
            return Result(script, _stage_without_run(script), problem=_problem(script))
        group: Sequence[RunInfo] = self.groups.get(head.spec.group, [])
        try:
            return _result(script, diagnosis_data.opened(head, group))
        except AmpscopeError as error:  # one damaged diagnosis hides no other
            return Result(script, Stage.COULD_NOT_RUN, head, problem=str(error))


def _result(script: str, case: Case) -> Result:
    if case.is_moving or case.report is None:
        return Result(script, Stage.RUNNING, case.head)
    report, as_is = case.report, diagnosis_data.view(case.run_of("as_is") or case.head)
    problem = could_not_run(report, as_is)
    if problem:
        return Result(script, Stage.COULD_NOT_RUN, case.head, problem=problem)
    findings = report.diagnosis.findings
    was_compared = "fp32" in report.control_symptoms
    word = report.diagnosis.verdict if was_compared else "inconclusive"
    return Result(
        script,
        Stage.DONE,
        case.head,
        found=findings[0].cause if findings else word,
        module=findings[0].verdict.module if findings else None,
        cured=fix_words.verified(report),
    )


def _stage_without_run(script: str) -> Stage:
    if diagnosis_jobs.is_running(str(script_path(script))):
        return Stage.RUNNING
    return Stage.COULD_NOT_RUN if _problem(script) else Stage.NOT_YET


def _problem(script: str) -> str:
    return diagnosis_jobs.problem(str(script_path(script)))


def _zoo_name(workload: str) -> str:
    """File name of a zoo's script, else an empty text."""
    path = PurePath(workload)
    return path.name if path.parts[-3:-1] == _FOLDER else ""
