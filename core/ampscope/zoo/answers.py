"""The answer key of the fault zoo, read from ``answers.toml``, and the names of healthy scripts.

Kept apart from the rules on purpose (no rule may import this): a diagnosis is scored against it,
never helped by it. One case, as data::

    ExpectedAnswer(id="C30", script="c30_row_scaling.py", twin="c30_row_scaling_healthy.py",
           cause="norm_eps_underflow", module="scale_rows", op_hint="div", ...)
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
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
    text = (FOLDER / "answers.toml").read_text(encoding="utf-8")
    return tuple(_answer(case_id, case) for case_id, case in tomllib.loads(text).items())


ANSWERS: tuple[ExpectedAnswer, ...] = _load()


def examples_of(cause: str) -> list[tuple[str, str]]:
    """(case, report that it was rebuilt from) of the scripts that fail for this cause."""
    return [(answer.id, answer.source) for answer in ANSWERS if answer.cause == cause]


def script_path(name: str) -> Path:
    """File of a zoo script."""
    return FOLDER / "scripts" / name
