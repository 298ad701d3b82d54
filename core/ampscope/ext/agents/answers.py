"""What the tools of an agent answer: records of bounded size, read from a store.

Lists come in pages: ``next_offset`` asks for the next one and is None on the last. Texts of runs
(titles, notes, lines of source) are data: invisible characters are spelled out and long texts cut
(:func:`ampscope.story.document.visible`). Numbers that are not finite are the texts nan, inf and
-inf.

Whole answers have no slots: the SDK (2.3) takes a slot for a field's default, and then publishes no
schema.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ampscope.analysis.distribution import merged
from ampscope.control import BASELINE, Control
from ampscope.diagnosis.load import load_diagnosis, trial_under
from ampscope.errors import BadInput
from ampscope.ext.diff.two_runs import Pair, pairs, parting, parting_answer
from ampscope.ext.preflight.checks import Result
from ampscope.record_json import finite
from ampscope.records import Frame, Role, RunInfo, ShadowRecord
from ampscope.render.contract import document
from ampscope.store.reader import Reader
from ampscope.story import fix_words
from ampscope.story.document import line, visible

T = TypeVar("T")

PAGE, MOST_PER_PAGE = 20, 100  # entries of a list
FARTHEST = 100_000  # the largest offset
MOST_FINDINGS, MOST_NOTES, MOST_EVIDENCE = 5, 20, 20  # of a verdict
MOST_COMPARED = 200_000  # steps of each of two runs
CODE_LENGTH = 8_000  # characters of a patch

Number = int | float | str | None  # a text where it is not finite


def page(entries: Sequence[T], offset: int, limit: int) -> tuple[list[T], int | None]:
    """``limit`` entries from ``offset`` on, and the offset of the next page. Raises BadInput for an
    offset or limit that is none."""
    check_page(offset, limit)
    end = offset + limit
    return list(entries[offset:end]), end if end < len(entries) else None


def check_page(offset: int, limit: int) -> None:
    """Raises BadInput for an offset or limit that is none."""
    if not 0 <= offset <= FARTHEST:
        raise BadInput(f"The offset must be from 0 to {FARTHEST:,}, not {offset:,}.")
    if not 1 <= limit <= MOST_PER_PAGE:
        raise BadInput(f"The limit must be from 1 to {MOST_PER_PAGE}, not {limit:,}.")


@dataclass(frozen=True, slots=True)
class PreflightAnswer:
    """One finding of preflight at its place in a file; ``repair``: whether there is a safe one."""

    code: str
    name: str
    level: str
    path: str
    line: int
    column: int
    message: str
    repair: bool


@dataclass(frozen=True)
class Preflight:
    """What the source of training scripts proves before they run."""

    files: int
    total: int  # findings
    findings: list[PreflightAnswer]
    next_offset: int | None
    not_read: list[str]  # one sentence for each file that was left out, 20 at most
    diff: str  # the safe repairs as a unified diff, where it was asked for


def preflight(result: Result, diff: str, offset: int, limit: int) -> Preflight:
    """The answer to a check of files."""
    shown, following = page(result.findings, offset, limit)
    findings = [
        PreflightAnswer(
            f.code.code, f.code.name, f.code.level, line(f.path, 1000), f.line, f.column,
            visible(f.message), bool(f.edits),
        )
        for f in shown
    ]  # fmt: skip
    left_out = [visible(sentence) for sentence in result.unread[:MOST_NOTES]]
    patch = visible(diff, CODE_LENGTH)
    return Preflight(
        len(result.sources), len(result.findings), findings, following, left_out, patch
    )


@dataclass(frozen=True, slots=True)
class EvidenceAnswer:
    """One measurement that a finding rests on."""

    name: str
    value: Number
    threshold: Number  # None where the rule has none
    run: str  # its id
    step: int | None


@dataclass(frozen=True, slots=True)
class Remedy:
    """The fix of a finding. ``verified`` is true where a run with the fix lost the symptom and
    followed the fp32 control, false where fixes were run and none did, null where none was run or
    an effect cannot be measured. ``control`` is what try_fix takes."""

    kind: str
    text: str
    patch: str
    verified: bool | None
    verification: str
    control: str | None


@dataclass(frozen=True, slots=True)
class CauseAnswer:
    """One finding; the first of a verdict is the root cause."""

    code: str  # AMP001: read ampscope://rules/AMP001
    cause: str
    severity: str
    module: str | None
    op: str | None
    phase: str | None
    step: int | None
    line: str | None  # FILE:LINE
    explanation: str
    evidence: list[EvidenceAnswer]  # read_verdict pages through it
    evidence_total: int
    fix: Remedy
    consequences: list[str]  # causes that follow from this one


@dataclass(frozen=True, slots=True)
class Tried:
    """One fix that was run. ``cured``: true, false, or null where that cannot be measured."""

    control: str
    kind: str
    cured: bool | None
    run: str


@dataclass(frozen=True)
class VerdictAnswer:
    """What a diagnosis concluded. ``verdict`` is fault, no_fault or inconclusive; ``reason`` says
    why it is inconclusive."""

    run: str  # the baseline run, which read_verdict, try_fix and render_chart take
    script: str
    verdict: str
    headline: str  # what ran in which precision
    reason: str
    scope: str
    symptoms: list[str]
    findings: list[CauseAnswer]  # 5 at most
    findings_total: int
    latent: list[str]  # causes of numbers that are lost without harm so far
    controls: dict[str, bool | None]  # fp32, bf16: whether they are healthy; null: not run
    tried: list[Tried]
    notes: list[str]
    next_offset: int | None  # of the evidence of the findings


def read_verdict(reader: Reader, run_id: str, offset: int, limit: int) -> VerdictAnswer:
    """The verdict of the diagnosis that the run belongs to, with its evidence from ``offset`` on.
    Raises BadInput for a run of no diagnosis, or one whose baseline has not ended."""
    check_page(offset, limit)
    return verdict(finite(document(load_diagnosis(reader, run_id))), offset, limit)


def verdict(told: dict[str, Any], offset: int = 0, limit: int = MOST_EVIDENCE) -> VerdictAnswer:
    """The causes, evidence and fixes of a diagnosis, from its JSON document ``told``
    (:mod:`ampscope.render.contract`); ``offset`` and ``limit`` page through the evidence."""
    causes = [_cause(f, offset, limit) for f in told["findings"][:MOST_FINDINGS]]
    longest = max((c.evidence_total for c in causes), default=0)
    headline = told["precision"]["headline"] if told["precision"] else ""
    return VerdictAnswer(
        run=told["runs"].get(BASELINE, ""),
        script=line(told["script"], 1000),
        verdict=told["verdict"],
        headline=visible(headline),
        reason=visible(told["reason"] or ""),
        scope=told["scope"]["sentence"],
        symptoms=told["symptoms"],
        findings=causes,
        findings_total=len(told["findings"]),
        latent=[f"{f['code']} {f['cause']}" for f in told["latent"]],
        controls={name: control["ok"] for name, control in told["controls"].items()},
        tried=[Tried(**tried) for tried in told["tried"]],
        notes=[visible(note) for note in told["notes"][:MOST_NOTES]],
        next_offset=offset + limit if offset + limit < longest else None,
    )


def _cause(found: dict[str, Any], offset: int, limit: int) -> CauseAnswer:
    fix = found["fix"]
    evidence = [
        EvidenceAnswer(line(m["name"]), m["value"], m["threshold"], m["run"], m["step"])
        for m in found["evidence"][offset : offset + limit]
    ]
    remedy = Remedy(
        fix["kind"], visible(fix["text"]), visible(fix["patch"] or "", CODE_LENGTH),
        fix["verified"], visible(fix["verification"]), fix["control"],
    )  # fmt: skip
    places = {name: _named(found[name]) for name in ("module", "op", "phase", "line")}
    return CauseAnswer(
        code=found["code"],
        cause=found["cause"],
        severity=found["severity"],
        step=found["step"],
        explanation=visible(found["explanation"]),
        evidence=evidence,
        evidence_total=len(found["evidence"]),
        fix=remedy,
        consequences=[c["cause"] for c in found["consequences"]],
        **places,
    )


def _named(text: str | None) -> str | None:
    return None if text is None else line(text)


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run. ``verdict`` is of the diagnosis whose baseline it is, behind a space its
    root cause."""

    id: str
    title: str
    kind: str  # script, probe, watch, or a measurement
    control: str  # what was changed in a script's run; as_is: nothing
    state: str
    created: str  # ISO 8601, UTC
    steps: int
    message: str
    verdict: str | None


@dataclass(frozen=True)
class Runs:
    """Runs of the store, newest first."""

    runs: list[Run]
    next_offset: int | None


def runs(reader: Reader, offset: int, limit: int) -> Runs:
    """A page of them."""
    check_page(offset, limit)
    shown, following = page(reader.runs(offset + limit + 1), offset, limit)
    verdicts = {id_: f"{v.word} {v.cause}".rstrip() for id_, v in reader.verdicts().items()}
    return Runs([run(info, verdicts.get(info.id)) for info in shown], following)


def run(info: RunInfo, concluded: str | None) -> Run:
    """One of them."""
    created = datetime.datetime.fromtimestamp(info.created, datetime.UTC)
    return Run(
        info.id, line(info.title), info.spec.kind, line(info.spec.control), str(info.state),
        created.isoformat(timespec="seconds"), info.steps_done, visible(info.message, 1000),
        concluded,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModulePair:
    """One module of both runs, as [first, second]; null where a run lacks it or its values."""

    path: str
    type: str
    weights: list[str | None]  # dtypes of its own parameters
    values: list[str | None]  # dtypes of the histogram's values
    lost: list[Number]  # share of the elements that underflowed, 0 to 1; null: no fp32 shadow
    zeros: list[Number]  # share of the elements, 0 to 1
    nonfinite: list[int | None]  # elements


@dataclass(frozen=True)
class Compared:
    """One run against another, as [first, second]. Losses are compared number by number at the
    steps that both recorded; modules at one step of one role, those that differ most first."""

    runs: list[str]
    answer: str
    common_steps: int
    first_different_step: int | None
    last_common_step: int | None  # at which both losses are finite
    relative_difference: Number  # there: second less first, over the first
    first_nonfinite_step: list[int | None]
    skipped_steps: list[int]
    role: str | None  # of the values below; null where the runs have no histograms in common
    step: int | None
    modules: list[ModulePair]  # of those that differ
    modules_different: int
    modules_total: int
    next_offset: int | None


def compared(
    reader: Reader, first: str, second: str, role: str | None, offset: int, limit: int
) -> Compared:
    """``role``: activation, grad_output, weight, weight_grad or update; None: the first that both
    have. Raises BadInput for a run that is not there or is too long, and an unknown role."""
    check_page(offset, limit)
    infos = reader.run(first), reader.run(second)
    for info in infos:
        if info.steps_done > MOST_COMPARED:
            raise BadInput(
                f"Run {info.id} has {info.steps_done:,} steps; {MOST_COMPARED:,} can be compared."
            )
    found = parting(*(reader.steps(info.id) for info in infos))
    skipped = [reader.step_totals(info.id).skipped for info in infos]
    names = tuple(f"{line(info.title)} ({info.id})" for info in infos)
    place = _common(reader, infos, role)
    frames: list[Frame | None] = [None, None]
    shadows: list[Sequence[ShadowRecord]] = [(), ()]
    if place is not None:
        frames = [reader.frame(info.id, *place) for info in infos]
        shadows = [reader.shadows(info.id, *place) for info in infos]
    first_values, second_values = (f if f is None else merged(f) for f in frames)
    first_modules, second_modules = (reader.modules(info.id) for info in infos)
    all_pairs = pairs(
        first_modules, second_modules, first_values, second_values, (shadows[0], shadows[1])
    )
    differing = [pair for pair in all_pairs if not pair.is_alike]
    shown, following = page(differing, offset, limit)
    return Compared(
        runs=[info.id for info in infos],
        answer=parting_answer((names[0], names[1]), found),
        common_steps=found.steps,
        first_different_step=found.first_different,
        last_common_step=found.at,
        relative_difference=finite(found.apart),
        first_nonfinite_step=list(found.first_nonfinite),
        skipped_steps=skipped,
        role=None if place is None else str(place[0]),
        step=None if place is None else place[1],
        modules=[_module_pair(pair) for pair in shown],
        modules_different=len(differing),
        modules_total=len(all_pairs),
        next_offset=following,
    )


def _common(reader: Reader, infos: Sequence[RunInfo], role: str | None) -> tuple[Role, int] | None:
    """The first step of one role with frames of that step alone in both runs: there the weights of
    both are most likely still the same."""
    if role is not None and role not in list(Role):
        raise BadInput(f"There is no role {role!r}. Use one of: {', '.join(Role)}.")
    for one in (Role(role),) if role else Role:
        single = [
            {first for first, last in reader.frame_spans(info.id, one) if first == last}
            for info in infos
        ]
        if common := single[0] & single[1]:
            return one, min(common)
    return None


def _module_pair(pair: Pair) -> ModulePair:
    sides = pair.first, pair.second
    return ModulePair(
        line(pair.path), line(pair.type), [s.weights for s in sides], [s.values for s in sides],
        [finite(s.lost) for s in sides], [finite(s.zeros) for s in sides],
        [s.nonfinite for s in sides],
    )  # fmt: skip


@dataclass(frozen=True)
class FixTried:
    """What a run under ``control`` showed. ``cured``: true where the symptom is gone and the loss
    follows the fp32 control, false where not, null where an effect cannot be measured or the
    diagnosis has no finding to cure."""

    run: str
    control: str
    words: str
    state: str
    message: str  # how the run ended, where not by itself
    cause: str | None  # the finding that it was judged by
    cured: bool | None
    answer: str
    step_time_ratio: Number  # processor time over the baseline's; null where it cannot be compared
    peak_memory_ratio: Number


def fix_tried(reader: Reader, run_id: str, control: str) -> FixTried:
    """The newest run under ``control`` of the diagnosis that ``run_id`` belongs to, judged. Raises
    BadInput where there is none."""
    found = load_diagnosis(reader, run_id)
    info = found.runs.get(control)
    if info is None:
        raise BadInput(f"Nothing was recorded of a run under {control!r}.")
    trial = trial_under(reader, found, control)
    findings = found.diagnosis.findings
    said = fix_words.outcome(trial) if trial else "the diagnosis has no finding to judge it by"
    return FixTried(
        run=info.id, control=control, words=Control(control).words, state=str(info.state),
        message=visible(info.message), cause=findings[0].cause if findings else None,
        cured=trial.cured if trial else None, answer=said,
        step_time_ratio=finite(trial.price) if trial else None,
        peak_memory_ratio=finite(trial.memory) if trial else None,
    )  # fmt: skip
