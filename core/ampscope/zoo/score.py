"""Diagnose zoo scripts and compare with the answer key: the only place where the two meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ampscope.launcher.plan import run_diagnosis
from ampscope.records import RunSpec
from ampscope.story import fix_words
from ampscope.zoo.answers import ANSWERS, HEALTHY, ExpectedAnswer, script_path

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


def scores(
    wanted: tuple[str, ...], store: Path, say: Callable[[str], None], *, healthy: bool = True
) -> Iterator[Score]:
    """Diagnose the cases whose id is wanted (all when empty), their twins, the healthy scripts."""
    for answer in ANSWERS:
        if wanted and answer.id.lower() not in wanted:
            continue
        yield _diagnosed(answer.script, answer, answer.policy, store, say)
        if answer.twin is not None and healthy:
            yield _diagnosed(answer.twin, None, answer.policy, store, say)
    for name in HEALTHY if healthy and not wanted else ():
        yield _diagnosed(name, None, "any", store, say)


def _diagnosed(
    script: str, answer: ExpectedAnswer | None, policy: str, store: Path, say: Callable[[str], None]
) -> Score:
    """``answer`` is None for a healthy script."""
    say(script)
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
    report = run_diagnosis(spec, store)
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
