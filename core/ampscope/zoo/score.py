"""Diagnose zoo scripts and compare with the answer key: the only place where the two meet. The
answer key is read here too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources import files
from pathlib import Path
from typing import Any

from ampscope.launcher.plan import run_diagnosis
from ampscope.records import RunSpec
from ampscope.story import fix_words

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


# The answer key of the fault zoo, read from ``answers.toml``, and the names of healthy scripts.
#
# Kept apart from the rules on purpose (no rule may import this): a diagnosis is scored against it,
# never helped by it. One case, as data::
#
#     ExpectedAnswer(id="C30", script="c30_row_scaling.py", twin="c30_row_scaling_healthy.py",
#            cause="norm_eps_underflow", module="scale_rows", op_hint="div", ...)


# Healthy scripts beside the twins. Each looks suspicious in a way that must not raise an alarm.
HEALTHY: tuple[str, ...] = (
    "h01_scale_search.py",  # 7 skips from an initial scale of 2^24, and a late one
    "h02_sparse_router.py",  # silent units, padding, an unused branch: 86 % zero gradients
    "h03_gradient_accumulation.py",  # four micro-batches, unscale_ and clip once a window
    "h04_gan_two_scalers.py",  # two losses that need not share a scale
    "h05_lbfgs_fit.py",  # closures, several backward passes per step, fp32 throughout
    "h06_bf16_ema.py",  # bf16 without a scaler, moving average in fp32
    "h07_clip_and_schedule.py",  # unscale_ then clip; the first steps skipped, so a warning
    "h08_gradient_penalty.py",  # the gradient is divided by the scale before its norm is taken
    "h09_checkpoint_resume.py",  # resume with the scaler's state; evaluation between epochs
    "h10_masked_attention.py",  # mask with finfo.min; 14 % of tanh's inputs are inf, harmlessly
)


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """What a case's script does wrong, where, and what cures it."""

    id: str
    script: str
    """File name under ``scripts``."""
    twin: str | None
    """File name of the healthy twin; None where the script itself is healthy."""
    cause: str
    fix_kinds: tuple[str, ...]
    """Fix kinds that are right; the first is the one that the report's authors adopted."""
    appliable: bool
    """Whether one of them can be applied from outside and, tried by hand, cured the symptom."""
    source: str
    note: str
    accept: tuple[str, ...] = ()
    """Other causes that count as right when they are the first finding."""
    module: str | None = None
    """Dotted path in the script's model; None where no module of it is to blame."""
    op_hint: str | None = None
    """Part of the name of the first bad aten op; None where no single op is to blame."""
    policy: str = "any"
    """Op lists under which the fault shows on a CPU: native, cuda or any (both)."""

    @property
    def source_url(self) -> str:
        """GitHub redirects /issues/N to the pull request of that number."""
        repository, _, number = self.source.partition("#")
        return f"https://github.com/{repository}/issues/{number}" if number else ""


def _answer(case_id: str, case: dict[str, Any]) -> ExpectedAnswer:
    script, has_twin = case.pop("script"), case.pop("twin", True)
    for name in ("fix_kinds", "accept"):
        case[name] = tuple(case.get(name, ()))
    twin = f"{script}_healthy.py" if has_twin else None
    return ExpectedAnswer(case_id, f"{script}.py", twin, **case)


def _load() -> tuple[ExpectedAnswer, ...]:
    text = files("ampscope.zoo").joinpath("answers.toml").read_text(encoding="utf-8")
    return tuple(_answer(case_id, case) for case_id, case in tomllib.loads(text).items())


ANSWERS: tuple[ExpectedAnswer, ...] = _load()


def examples_of(cause: str) -> list[tuple[str, str]]:
    """(case, report that it was rebuilt from) of the scripts that fail for this cause."""
    return [(answer.id, answer.source) for answer in ANSWERS if answer.cause == cause]
