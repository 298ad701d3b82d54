"""A diagnosis read back from the store: evidence is kept, verdicts are computed anew.

So a better rule improves old diagnoses, and what a page shows can never differ from what the
measurements say.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.control import Control
from ampscope.diagnosis.cure import by_trials, is_cured, judged
from ampscope.diagnosis.result import (
    SEARCHED,
    USE_BF16,
    DiagnosisResult,
    is_everything,
    report_of,
    trial_of,
)
from ampscope.errors import BadInput
from ampscope.records import RunInfo, State
from ampscope.store.reader import Reader


def load_diagnosis(reader: Reader, run_id: str) -> DiagnosisResult:
    """The diagnosis that ``run_id`` (any of its runs) belongs to.

    Raises BadInput for a probe, or while the baseline run has not ended.
    """
    info = reader.run(run_id)
    if info.spec.kind != "script":
        raise BadInput("This run is a probe. Diagnose a script with: ampscope diagnose train.py")
    group = counting(reader.group(info.spec.group))
    infos = {r.spec.control: r for r in group} or {info.spec.control: info}
    first = infos.get("as_is", info)
    if first.state.is_active:
        raise BadInput("The baseline run has not ended yet; the diagnosis begins when it ends.")
    views = {name: _view(reader, r) for name, r in infos.items() if not r.state.is_active}
    views.setdefault("as_is", _view(reader, first))
    policy = first.machine.policy if first.machine else "native"
    evidence = Evidence(views, policy)
    diagnosis = by_trials(judged(evidence), evidence)
    trials = []
    if diagnosis.findings:
        finding = diagnosis.findings[0]
        for name, view in views.items():
            if name in finding.verdict.fix.controls or Control(name).first.name == "fp32_modules":
                cured = is_cured(finding, evidence, view, views.get(Control(name).in_fp32))
                fix = finding.verdict.fix
                trials.append(trial_of(name, fix, view, views["as_is"], cured=cured))
        bf16 = views.get("bf16")
        under_way = any(r.state.is_active for r in infos.values())
        if bf16 is not None and finding.cause in SEARCHED and not under_way:
            # As the live diagnosis does: where nothing else cures but fp32 throughout.
            others = [t for t in trials if not is_everything(t.control, views["as_is"])]
            if not any(t.cured for t in others):
                cured = is_cured(finding, evidence, bf16, None)
                trial = trial_of("bf16", USE_BF16, bf16, views["as_is"], cured=cured)
                trials = [*others, trial] if cured else [*trials, trial]
    ended = [r.ended for r in infos.values() if r.ended is not None]
    elapsed_s = (max(ended) - first.created) if ended else 0.0
    return report_of(diagnosis, views, infos, tuple(trials), elapsed_s)


def counting(runs: Sequence[RunInfo]) -> list[RunInfo]:
    """A fix that is run again counts once it has finished; until then the earlier run does."""
    finished = {r.spec.control for r in runs if r.state is State.FINISHED}
    return [r for r in runs if r.state is State.FINISHED or r.spec.control not in finished]


def _view(reader: Reader, info: RunInfo) -> RunView:
    return RunView(info.spec.control, info.id, reader.observations(info.id))
