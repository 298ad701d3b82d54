"""A diagnosis read back from the store: what it concluded, or its evidence judged anew.

Every surface shows the same conclusion, word for word, until a user asks for another: better
rules judge old evidence again on request. Where nothing was concluded (an import, a run that was
added since), the evidence is judged by the rules of today.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

from ampscope import __version__
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.lead import Lead
from ampscope.analysis.precision_use import PrecisionUse
from ampscope.analysis.results import ComparedResult
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE, Control
from ampscope.diagnosis.compiled import diagnosis_with_compiled_run
from ampscope.diagnosis.cure import by_trials, is_cured
from ampscope.diagnosis.findings import Diagnosis, Finding, casts_left_out
from ampscope.diagnosis.result import (
    USE_BF16,
    CompiledRun,
    DiagnosisResult,
    Trial,
    gpu_that_emulates_bf16,
    is_everything,
    report_of,
    trial_of,
    under_policy,
)
from ampscope.errors import BadInput
from ampscope.observations import HalfSite
from ampscope.record_json import Check, Decoder, Refusal
from ampscope.records import RunInfo, State
from ampscope.rules.catalog import by_cause
from ampscope.rules.verdict import Verdict
from ampscope.store.codec import Damaged, parsed, storable_parts
from ampscope.store.reader import Reader
from ampscope.store.writer import keep_conclusion


def load_diagnosis(reader: Reader, run_id: str, *, again: bool = False) -> DiagnosisResult:
    """The diagnosis that ``run_id`` (any of its runs) belongs to: as it was concluded, or judged by
    the rules of today where ``again`` asks for that or nothing was concluded of its runs.

    Raises BadInput for a probe, or while the baseline run has not ended.
    """
    info = reader.run(run_id)
    if info.spec.kind != "script":
        raise BadInput("This run is a probe. Diagnose a script with: ampscope diagnose train.py")
    group = counting(reader.group(info.spec.group))
    infos = {r.spec.control: r for r in group} or {info.spec.control: info}
    first = infos.get(BASELINE, info)
    if first.state.is_active:
        raise BadInput("The baseline run has not ended yet; the diagnosis begins when it ends.")
    concluded = None if again else _concluded(reader.conclusion(first.id), infos)
    return concluded or _judged_anew(reader, first, infos)


def judge_again(store: Path, run_id: str) -> tuple[DiagnosisResult, DiagnosisResult]:
    """What was concluded, and what the rules of today conclude, which is stored in its place.

    Raises BadInput as :func:`load_diagnosis` does.
    """
    with Reader(store) as reader:
        before = load_diagnosis(reader, run_id)
        after = load_diagnosis(reader, run_id, again=True)
    if BASELINE in after.runs:
        keep_conclusion(store, after.runs[BASELINE].id, stored(after))
    return before, after


def _judged_anew(reader: Reader, first: RunInfo, infos: dict[str, RunInfo]) -> DiagnosisResult:
    views = {name: _view(reader, r) for name, r in infos.items() if not r.state.is_active}
    for name, view in list(views.items()):  # what was cut short says nothing
        is_shorter = infos[name].spec.time_limit_s < first.spec.time_limit_s
        is_cut = is_shorter and view.outcome.ended in ("time", "killed")
        if is_cut or infos[name].state is State.CANCELLED:
            del views[name]
    views.setdefault(BASELINE, _view(reader, first))
    policy = first.machine.policy if first.machine else "native"
    evidence = Evidence(views, policy, emulates_bf16=bool(gpu_that_emulates_bf16(first)))
    diagnosis = by_trials(diagnosis_with_compiled_run(evidence), evidence)
    trials = []
    if diagnosis.findings:
        finding = diagnosis.findings[0]
        for name, view in views.items():
            if view.outcome.is_out_of_memory:  # that says nothing of the fix
                continue
            is_fp32 = Control(name).first.name in ("fp32_modules", "fp32_lines")
            if name in finding.verdict.fix.controls or is_fp32:
                cured = is_cured(finding, evidence, view, views.get(Control(name).in_fp32))
                fix = finding.verdict.fix
                trials.append(trial_of(name, fix, view, views[BASELINE], cured=cured))
        bf16 = views.get("bf16")
        under_way = any(r.state.is_active for r in infos.values())
        is_offered = finding.rule.searches_modules and not evidence.emulates_bf16
        is_offered &= casts_left_out(evidence) is None
        if bf16 is not None and bf16.outcome.is_out_of_memory:
            bf16 = None
        if bf16 is not None and is_offered and not under_way:
            # As the live diagnosis does: where nothing else cures but fp32 throughout.
            others = [t for t in trials if not is_everything(t.control, views[BASELINE])]
            if not any(t.cured for t in others):
                cured = is_cured(finding, evidence, bf16, None)
                trial = trial_of("bf16", USE_BF16, bf16, views[BASELINE], cured=cured)
                trials = [*others, trial] if cured else [*trials, trial]
    ended = [r.ended for r in infos.values() if r.ended is not None]
    elapsed_s = (max(ended) - first.created) if ended else 0.0
    return report_of(diagnosis, views, infos, tuple(trials), elapsed_s)


def trial_under(reader: Reader, result: DiagnosisResult, control: str) -> Trial | None:
    """What the run under ``control``, one of ``result.runs``, shows of the first finding, whether
    or not the rule proposes it; None where nothing was found, or while a run has not ended."""
    if not result.diagnosis.findings or any(r.state.is_active for r in result.runs.values()):
        return None
    finding = result.diagnosis.findings[0]
    views = {name: _view(reader, info) for name, info in result.runs.items()}
    evidence = Evidence(views, result.diagnosis.policy)
    in_fp32 = views.get(Control(control).in_fp32)
    cured = is_cured(finding, evidence, views[control], in_fp32)
    runs = views[control], views[BASELINE]
    trial = trial_of(control, finding.verdict.fix, *runs, cured=cured)
    return under_policy(trial, result.diagnosis.policy)


def counting(runs: Sequence[RunInfo]) -> list[RunInfo]:
    """A fix that is run again counts once it has finished; until then the earlier run does."""
    finished = {r.spec.control for r in runs if r.state is State.FINISHED}
    return [r for r in runs if r.state is State.FINISHED or r.spec.control not in finished]


def _view(reader: Reader, info: RunInfo) -> RunView:
    return RunView(info.spec.control, info.id, reader.observations(info.id))


@dataclass(frozen=True, slots=True)
class _Conclusion:
    """What is stored of a result: all but the script's output and the runs, which the store holds
    anyway. A rule is named; one that there no longer is has no answer."""

    runs: tuple[tuple[str, str], ...]  # control, run id: the runs that it was drawn from
    diagnosis: _Diagnosis
    script: str
    trials: tuple[Trial, ...]
    elapsed_s: float
    could_not_run: str
    notes: tuple[str, ...]
    control_symptoms: tuple[tuple[str, tuple[str, ...]], ...]
    judged_steps: int
    cut_short: str
    precision: PrecisionUse | None
    ended: str
    lead: Lead | None
    rules: str
    rank: int | None = None
    compiled: tuple[CompiledRun, ...] = ()
    results: tuple[ComparedResult, ...] = ()
    sites: tuple[HalfSite, ...] = ()


@dataclass(frozen=True, slots=True)
class _Diagnosis:
    verdict: str
    findings: tuple[Finding, ...]
    answers: tuple[tuple[str, Verdict], ...]
    symptoms: tuple[str, ...]
    policy: str
    notes: tuple[str, ...]
    undecided: str
    latent: tuple[Finding, ...]


class _Words(Decoder):
    """Reads an enumeration's member by its word as well."""

    def plain(self, hint: type[Any], kind: type[Any], name: str) -> Check:
        """The check of one field."""
        if not issubclass(hint, StrEnum):
            return super().plain(hint, kind, name)

        def check(value: object) -> StrEnum:
            if value not in list(hint):
                raise Refusal("value", f"is none of {', '.join(hint)}")
            return hint(str(value))

        return check


_CONCLUSIONS = _Words()


@functools.cache
def rules_version() -> str:
    """Of the rules of today: ampscope's version, and a digest of the files that judge."""
    digest = hashlib.sha256()
    for room in ("ampscope.analysis", "ampscope.rules", "ampscope.diagnosis"):
        for file in sorted(resources.files(room).iterdir(), key=lambda f: f.name):
            if file.name.endswith(".py"):
                digest.update(file.read_bytes())
    return f"{__version__} ({digest.hexdigest()[:8]})"


def stored(result: DiagnosisResult) -> str:
    """JSON of what the diagnosis concluded, for :meth:`Reader.conclusion`."""
    diagnosis = result.diagnosis
    kept = _kept(_Diagnosis, diagnosis) | {
        "answers": tuple((rule.id, verdict) for rule, verdict in diagnosis.answers)
    }
    conclusion = _kept(_Conclusion, result) | {
        "diagnosis": _Diagnosis(**kept),
        "runs": tuple((control, info.id) for control, info in result.runs.items()),
        "control_symptoms": tuple(result.control_symptoms.items()),
        "rules": result.rules or rules_version(),
    }
    parts = storable_parts(dataclasses.asdict(_Conclusion(**conclusion)))
    return json.dumps(parts, separators=(",", ":"))


def _kept(kind: type[Any], of: object) -> dict[str, Any]:
    return {f.name: getattr(of, f.name, None) for f in dataclasses.fields(kind)}


def _concluded(data: str, infos: dict[str, RunInfo]) -> DiagnosisResult | None:
    """The stored conclusion on these very runs; None where there is none, or a damaged one."""
    try:
        found = _CONCLUSIONS.record(_Conclusion, parsed(data)) if data else None
    except (Refusal, Damaged, ValueError):
        return None
    if found is None:
        return None
    drawn_from = set(found.runs)
    ended = {(control, info.id) for control, info in infos.items() if not info.state.is_active}
    stopped = {pair for pair in ended - drawn_from if infos[pair[0]].state is State.CANCELLED}
    if ended - stopped != drawn_from:  # a run that a user stopped adds nothing
        return None
    rules = by_cause()
    answers = tuple((rules[id_], v) for id_, v in found.diagnosis.answers if id_ in rules)
    diagnosis = _kept(Diagnosis, found.diagnosis) | {"answers": answers}
    result = _kept(DiagnosisResult, found) | {
        "diagnosis": Diagnosis(**diagnosis),
        "runs": {control: infos[control] for control, _ in found.runs},
        "control_symptoms": dict(found.control_symptoms),
        "output": "",
    }
    return DiagnosisResult(**result)
