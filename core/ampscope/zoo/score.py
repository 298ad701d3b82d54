"""Diagnose zoo scripts and compare with the answer key: the only place where the two meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ampscope.experiments.diagnosis import run_diagnosis
from ampscope.records import RunSpec
from ampscope.report import fix_words
from ampscope.verdicts.report import Report
from ampscope.zoo.answers import ANSWERS, HEALTHY, Answer

STEPS = 300
TIME_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Score:
    """One diagnosed script. ``case`` is "" for a healthy script."""

    script: str
    case: str
    expected: str
    found: str  # first finding's cause, or the verdict
    among_three: bool
    module_expected: str | None
    module_found: str | None
    fix_kind: str
    verified: bool | None
    can_verify: bool
    elapsed_s: float

    @property
    def right(self) -> bool:
        """The first finding is the expected cause, or a healthy script was called healthy."""
        return self.found == self.expected

    @property
    def module_right(self) -> bool | None:
        """None for a case without a module to blame."""
        return None if self.module_expected is None else self.module_found == self.module_expected


def script_path(name: str) -> Path:
    """File of a zoo script."""
    return Path(str(resources.files("ampscope.zoo"))) / "scripts" / name


def scores(
    wanted: tuple[str, ...], store: Path, say: Callable[[str], None], *, healthy: bool = True
) -> Iterator[Score]:
    """Diagnose the cases whose id is wanted (all when empty), their twins, the healthy scripts."""
    for answer in ANSWERS:
        if wanted and answer.id.lower() not in wanted:
            continue
        say(answer.script)
        yield _score(answer.script, answer, _diagnose(answer.script, answer.policy, store))
        if answer.twin is not None and healthy:
            say(answer.twin)
            yield _score(answer.twin, None, _diagnose(answer.twin, answer.policy, store))
    for name in HEALTHY if healthy and not wanted else ():
        say(name)
        yield _score(name, None, _diagnose(name, "any", store))


def _diagnose(script: str, policy: str, store: Path) -> Report:
    path = script_path(script)
    spec = RunSpec(
        workload=str(path),
        kind="script",
        precision="as_is",
        steps=STEPS,
        policy="cuda" if policy == "cuda" else "native",
        time_limit_s=TIME_LIMIT_S,
        label=path.name,
        group=f"zoo-{path.stem}",
    )
    return run_diagnosis(spec, store)


def _score(script: str, answer: Answer | None, report: Report) -> Score:
    findings = report.diagnosis.findings
    names = [f.cause for f in findings] or [report.diagnosis.verdict]
    expected = answer.cause if answer else "no_fault"
    accepted = {expected, *(answer.accept if answer else ())}
    cured = fix_words.chosen(report)
    first = findings[0].verdict if findings else None
    return Score(
        script=script,
        case=answer.id if answer else "",
        expected=expected,
        found="could not run" if report.could_not_run else names[0],
        among_three=bool(accepted & set(names[:3])),
        module_expected=answer.module if answer else None,
        module_found=first.module if first else None,
        fix_kind=(cured.kind if cured else first.fix.kind) if first else "none",
        verified=fix_words.verified(report),
        can_verify=bool(answer and answer.appliable),
        elapsed_s=round(report.elapsed_s, 1),
    )
