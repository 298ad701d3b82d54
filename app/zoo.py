"""The page Zoo: every case with its source, its faulty script and its healthy twin, and what the
newest diagnosis in the store says of each script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath

import pandas as pd
import streamlit as st

from ampscope.causes import CAUSES
from ampscope.control import BASELINE
from ampscope.errors import AmpscopeError
from ampscope.records import RunInfo
from ampscope.story import fix_words
from ampscope.story.verdict_words import could_not_run
from ampscope.zoo.answers import ANSWERS, HEALTHY, ExpectedAnswer, script_path
from ampscope.zoo.score import STEPS
from app import chart, links, permissions
from app.chart import KeyFigure
from app.runs import diagnoses, run_page
from app.runs.diagnoses import DiagnosisCase
from app.text import cut, escape, plural, share

TABLE_PX = 430  # a dozen rows; the rest is scrolled to
WIDTHS = {
    "Case": 50,
    "Cause": 370,
    "Reported to": 240,
    "Found": 95,
    "Fix": 75,
    "Healthy twin": 95,
}
ALL, NOT_YET, EXPECTED, OTHERWISE = FILTERS = ("all", "not diagnosed", "as expected", "otherwise")
NO_FAULT = "no_fault"
_FOLDER = ("zoo", "scripts")  # a store may come from another place where ampscope is installed


def follow(rows: Sequence[ZooCase], healthy: Sequence[CaseResult]) -> None:
    """Draw the page anew while something is being diagnosed."""
    all_results = [*(r.faulty for r in rows), *(r.twin for r in rows if r.twin), *healthy]
    if any(r.stage is ScriptStage.RUNNING for r in all_results):
        st.fragment(_look_again, run_every=run_page.FOLLOW_EVERY_S)([r.stage for r in all_results])


def _look_again(stages: list[ScriptStage]) -> None:
    now = rows()
    results = [*(r.faulty for r in now), *(r.twin for r in now if r.twin), *healthy_scripts()]
    if [r.stage for r in results] != stages:
        st.rerun(scope="app")


def show_overview(rows: Sequence[ZooCase], healthy: Sequence[CaseResult]) -> None:
    """The sentence and the key figures."""
    chart.sentence(answer(rows))
    chart.key_figures(figures(rows, healthy))
    chart.see(
        "Each case rebuilds a failure that a user reported in public, as a script of its own. "
        "Its healthy twin differs in the fault alone, and must raise no alarm. A diagnosis takes "
        "about half a minute."
    )


def answer(rows: Sequence[ZooCase]) -> str:
    """How the diagnoses so far compare with what was expected."""
    done = [r for r in rows if r.faulty.stage is ScriptStage.DONE]
    if not done:
        return f"{plural(len(rows), 'real failure')}, none of them diagnosed on this machine yet."
    right = sum(r.is_right for r in done)
    return (
        f"{len(done)} of {plural(len(rows), 'case')} diagnosed; the expected cause came first in "
        f"{right} of {len(done)}."
    )


def figures(rows: Sequence[ZooCase], healthy: Sequence[CaseResult]) -> list[KeyFigure]:
    """Each with its base, and a word where there is none yet."""
    done = [r for r in rows if r.faulty.stage is ScriptStage.DONE]
    modules = [r for r in done if r.is_module_right is not None]
    fixes = [r for r in done if r.answer.appliable]
    twins = [t for r in rows if (t := r.twin) is not None] + list(healthy)
    judged = [t for t in twins if t.stage is ScriptStage.DONE]
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
            "Fix verified",
            _part(sum(bool(r.faulty.cured) for r in fixes), len(fixes)),
            "Of those whose fix ampscope can apply by itself",
        ),
        KeyFigure(
            "False alarms",
            _part(sum(t.found != NO_FAULT for t in judged), len(judged)),
            "Healthy scripts in which a fault was named",
        ),
    ]


def _part(part: int, whole: int) -> str:
    return share(part, whole).partition(",")[0] if whole else "none yet"


def show_cases(rows: Sequence[ZooCase]) -> None:
    """The table with what is looked for, and the one case that is opened."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        wanted = links.find("case", "A case, a cause, a project").lower()
        which = links.pick("Found", "zoo_found", FILTERS)
    named = [r for r in rows if r.answer.id.lower() == wanted]
    shown = named or [r for r in rows if wanted in _searched(r) and which in (ALL, _found_as(r))]
    if not shown:
        st.markdown("No case has that in its name, its cause or its source, and was found so.")
        return
    ids = [row.answer.id for row in shown]
    if len(shown) > 1:
        chart.see(f"{plural(len(shown), 'case')}. A row that is chosen is opened below.")
        st.dataframe(
            list_table(shown),
            key="zoo-table",
            hide_index=True,
            height=min(TABLE_PX, 38 + 35 * len(shown)),
            column_config={name: st.column_config.Column(width=px) for name, px in WIDTHS.items()},
            on_select=lambda: _open_chosen(ids),
            selection_mode="single-row",
        )
        chart.download(lambda: case_table(rows), "zoo", key="zoo")
    by_id = dict(zip(ids, shown, strict=True))
    opened = ids[0]
    if len(shown) > 1:
        opened = links.select(
            "Opened",
            "opened",
            ids,
            format_func=lambda id_: f"{id_} · {title(by_id[id_].answer.cause)}",
            help="Type to search.",
        )
    _case(by_id[opened])


def _open_chosen(ids: Sequence[str]) -> None:
    """A row of the table was chosen."""
    chosen = st.session_state["zoo-table"]["selection"]["rows"]
    if chosen and chosen[0] < len(ids):
        links.keep("opened", ids[chosen[0]])


def list_table(rows: Sequence[ZooCase]) -> pd.DataFrame:
    """A row for each case, as the page shows it."""
    fixes = {True: "verified", False: "none worked", None: ""}
    return pd.DataFrame(
        {
            "Case": [r.answer.id for r in rows],
            "Cause": [title(r.answer.cause) for r in rows],
            "Reported to": [r.answer.source for r in rows],
            "Found": [_found(r) for r in rows],
            "Fix": [fixes[r.faulty.cured] for r in rows],
            "Healthy twin": [
                ("no fault" if r.twin.found == NO_FAULT else title(r.twin.found))
                if r.twin and r.twin.stage is ScriptStage.DONE
                else (_stage(r.twin) if r.twin else "none")
                for r in rows
            ],
        }
    )


def _found_as(row: ZooCase) -> str:
    if row.faulty.stage is not ScriptStage.DONE:
        return NOT_YET
    return EXPECTED if row.is_right else OTHERWISE


def _stage(result: CaseResult) -> str:
    return "not yet" if result.stage is ScriptStage.NOT_YET else str(result.stage)


def _found(row: ZooCase) -> str:
    if row.faulty.stage is not ScriptStage.DONE:
        return _stage(row.faulty)
    is_expected = row.faulty.found == row.answer.cause
    return EXPECTED if is_expected else title(row.faulty.found)


def case_table(rows: Sequence[ZooCase]) -> pd.DataFrame:
    """What the list shows, for download."""
    return pd.DataFrame(
        {
            "case": [r.answer.id for r in rows],
            "source": [r.answer.source_url for r in rows],
            "script": [r.answer.script for r in rows],
            "expected": [r.answer.cause for r in rows],
            "found": [r.faulty.found or str(r.faulty.stage) for r in rows],
            "module_expected": [r.answer.module for r in rows],
            "module_found": [r.faulty.module for r in rows],
            "fix_seen_to_work": [r.faulty.cured for r in rows],
            "twin": [r.answer.twin for r in rows],
            "twin_found": [(r.twin.found or str(r.twin.stage)) if r.twin else "" for r in rows],
        }
    )


def _searched(row: ZooCase) -> str:
    answer = row.answer
    words = (
        answer.id,
        answer.cause,
        title(answer.cause),
        answer.source,
        answer.script,
        answer.note,
    )
    return " ".join(words).lower()


def _case(row: ZooCase) -> None:
    with st.container(border=True, gap="xsmall"):
        st.markdown(f"**{escape(row.answer.id)} · {escape(title(row.answer.cause))}**")
        with st.container(horizontal=True, vertical_alignment="center"):
            source = escape(cut(row.answer.source, 60))
            if row.answer.source_url:
                st.page_link(row.answer.source_url, label=source, icon=":material/open_in_new:")
            else:
                st.markdown(source, width="content")
            st.caption(escape(row.answer.note))
        left, right = st.columns(2)
        with left:
            _script("With the fault", row.faulty, faulty_result(row))
        with right:
            if row.twin is None:
                st.caption("This case is healthy itself and has no twin.")
            else:
                _script("Healthy twin", row.twin, healthy_result(row.twin))


def _script(name: str, result: CaseResult, text: str) -> None:
    st.markdown(f"**{escape(name)}.** {escape(text)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        _button(result)
        if result.head is not None:
            links.link(links.DIAGNOSIS, "Open the diagnosis", run=result.head.id)


def _button(result: CaseResult) -> None:
    if not permissions.is_trusted():
        return
    busy = diagnoses.busy_with()
    again = result.head is not None
    clicked = st.button(
        "Diagnose again" if again else "Diagnose",
        key=f"zoo-{result.script}",
        disabled=bool(busy) or result.stage is ScriptStage.RUNNING,
        help=escape(result.script) + ("; one diagnosis at a time" if busy else ""),
    )
    if clicked:
        try:
            start(result.script)
        except AmpscopeError as error:
            st.error(escape(str(error)))
        else:
            st.rerun()


def faulty_result(row: ZooCase) -> str:
    """Found beside expected, in one line."""
    result = row.faulty
    if result.stage is not ScriptStage.DONE:
        return _unfinished(result)
    module = f" in {result.module}" if result.module else ""
    judged = "as expected" if row.is_right else f"expected: {title(row.answer.cause)}"
    if not row.is_right and result.found in row.answer.accept:
        judged = f"accepted too; {judged}"
    if row.is_module_right is False:
        judged += f", in {row.answer.module}"
    fix = {True: " Fix verified.", False: " No fix worked.", None: ""}[result.cured]
    return f"Found: {title(result.found)}{module} ({judged}).{fix}"


def healthy_result(result: CaseResult) -> str:
    """A healthy script's verdict."""
    if result.stage is not ScriptStage.DONE:
        return _unfinished(result)
    if result.found == NO_FAULT:
        return "Found: no fault (as expected)."
    return f"False alarm: {title(result.found)}."


def _unfinished(result: CaseResult) -> str:
    text = result.stage.capitalize()
    return f"{text}: {result.problem}" if result.problem else f"{text}."


def show_healthy(results: Sequence[CaseResult]) -> None:
    """Scripts that only look suspicious."""
    if not results:
        return
    with chart.details(f"Further healthy scripts ({len(results)})"):
        for result in results:
            _script(result.script, result, healthy_result(result))


class ScriptStage(StrEnum):
    """How far one script's diagnosis is."""

    NOT_YET = "not diagnosed yet"
    RUNNING = "being diagnosed"
    DONE = "diagnosed"
    COULD_NOT_RUN = "could not be diagnosed"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What is known of one script. ``found`` is a cause, no_fault or inconclusive."""

    script: str
    stage: ScriptStage
    head: RunInfo | None = None
    found: str = ""
    module: str | None = None
    cured: bool | None = None  # None when no fix was run, or its effect cannot be measured
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ZooCase:
    """One case: the script with the fault, and its healthy twin."""

    answer: ExpectedAnswer
    faulty: CaseResult
    twin: CaseResult | None

    @property
    def is_right(self) -> bool:
        """The first finding is the cause that the answer key has."""
        return self.faulty.found == self.answer.cause

    @property
    def is_module_right(self) -> bool | None:
        """None for a case that has no module to blame."""
        return None if self.answer.module is None else self.faulty.module == self.answer.module


def rows() -> list[ZooCase]:
    """Every case in the order of the answers."""
    read = _Diagnoses()
    return [
        ZooCase(a, read.result(a.script), read.result(a.twin) if a.twin else None) for a in ANSWERS
    ]


def healthy_scripts() -> list[CaseResult]:
    """Further scripts without a fault, which have no faulty twin."""
    read = _Diagnoses()
    return [read.result(name) for name in HEALTHY]


class _Diagnoses:
    """One look at the store for all scripts."""

    def __init__(self) -> None:
        # What a file brought may say anything, under any script's name.
        self.runs = [run for run in diagnoses.recorded_runs() if not run.spec.imported]
        self.groups: dict[str, list[RunInfo]] = {}
        for run in self.runs:
            self.groups.setdefault(run.spec.group, []).append(run)
        self.newest: dict[str, RunInfo] = {}
        heads = diagnoses.group_heads(self.runs)
        for head in (h for h in heads if h.spec.control == BASELINE):
            self.newest.setdefault(_zoo_name(head.spec.workload), head)

    def result(self, script: str) -> CaseResult:
        head = self.newest.get(script)
        if head is None:
            return CaseResult(script, _stage_without_run(script), problem=_problem(script))
        group: Sequence[RunInfo] = self.groups.get(head.spec.group, [])
        try:
            return _result(script, diagnoses.read_case(head, group))
        except AmpscopeError as error:  # one damaged diagnosis hides no other
            return CaseResult(script, ScriptStage.COULD_NOT_RUN, head, problem=str(error))


def _result(script: str, case: DiagnosisCase) -> CaseResult:
    if case.is_moving or case.report is None:
        return CaseResult(script, ScriptStage.RUNNING, case.head)
    report, baseline = case.report, diagnoses.observed(case.run_of(BASELINE) or case.head)
    problem = could_not_run(report, baseline)
    if problem:
        return CaseResult(script, ScriptStage.COULD_NOT_RUN, case.head, problem=problem)
    findings = report.diagnosis.findings
    was_compared = "fp32" in report.control_symptoms
    word = report.diagnosis.verdict if was_compared else "inconclusive"
    return CaseResult(
        script,
        ScriptStage.DONE,
        case.head,
        found=findings[0].cause if findings else word,
        module=findings[0].verdict.module if findings else None,
        cured=fix_words.verified(report),
    )


def _stage_without_run(script: str) -> ScriptStage:
    if diagnoses.job_is_running(str(script_path(script))):
        return ScriptStage.RUNNING
    return ScriptStage.COULD_NOT_RUN if _problem(script) else ScriptStage.NOT_YET


def _problem(script: str) -> str:
    return diagnoses.job_problem(str(script_path(script)))


def _zoo_name(workload: str) -> str:
    """File name of a zoo's script, else an empty text."""
    path = PurePath(workload)
    return path.name if path.parts[-3:-1] == _FOLDER else ""


def start(script: str) -> None:
    """Diagnose a script of the zoo, under the rules that its fault shows under."""
    diagnoses.start_diagnosis(script_path(script), policy_of(script), STEPS)


def policy_of(script: str) -> str:
    """Under whose autocast rules the script's fault shows: native or cuda."""
    answer = next((a for a in ANSWERS if script in (a.script, a.twin)), None)
    return "cuda" if answer is not None and answer.policy == "cuda" else "native"


def title(cause: str) -> str:
    """A cause, or the verdict that stands in its place, in words."""
    if cause == "inconclusive":
        return "Undetermined"
    return CAUSES[cause].titled if cause in CAUSES else cause
