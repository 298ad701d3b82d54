"""One fix that was run: what kind it was, whether it cured, and what it costs in time."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.rules.verdict import Fix

_KINDS = {
    "bf16": "use_bf16", "fp32_modules": "fp32_module", "eps": "raise_eps",
    "fp32_state": "fp32_optimizer_state", "fp32_params": "fp32_params",
    "add_scaler": "add_scaler", "init_scale": "change_scale", "lr": "lower_lr",
    "unscale_first": "move_unscale", "separate_scalers": "separate_scalers",
    "fp32_lines": "rewrite_op",
}  # fmt: skip
# Causes for which the smallest set of modules in fp32 is looked for, and bf16 tried after that.
SEARCHED = ("activation_overflow", "elementwise_overflow", "reduction_overflow",
            "attention_logit_overflow", "log_zero_saturation", "norm_eps_underflow")  # fmt: skip
USE_BF16 = Fix("use_bf16", "Use bf16: it has the range of fp32.")


@dataclass(frozen=True, slots=True)
class Trial:
    """One fix that was run. ``cured`` is None where the pattern is removed and an effect cannot be
    measured (:mod:`.cure`). ``price`` is its time per optimizer step over the time as it is, and
    ``memory`` its peak memory over that as it is (on a CPU, of the whole process)."""

    control: str
    kind: str
    cured: bool | None
    price: float | None
    memory: float | None = None
    steps: int = 0  # optimizer steps of the run with the fix


def trial_of(
    control: str, fix: Fix, fixed: RunView, before: RunView, *, cured: bool | None
) -> Trial:
    """The trial that a run under ``control`` was, with what it costs."""
    peaks = fixed.outcome.peak_bytes, before.outcome.peak_bytes
    memory = peaks[0] / peaks[1] if all(peaks) else None
    steps = len(fixed.attempts)
    return Trial(control, kind_of(control, fix), cured, price(fixed, before), memory, steps)


def price(fixed: RunView, before: RunView) -> float | None:
    """Time an attempt of the fixed run over the time as it is; both were watched alike."""
    times = [
        v.outcome.elapsed_s / v.outcome.attempts if v.outcome.attempts else 0.0
        for v in (fixed, before)
    ]
    return times[0] / times[1] if times[1] else None


def kind_of(control: str, fix: Fix) -> str:
    """Fix kind of what was really run, which may be another than the rule's first choice."""
    return _KINDS.get(control.partition(":")[0], fix.kind)


def modules_with_parameters(view: RunView) -> list[str]:
    """Modules that own parameters, as candidates for fp32."""
    names = [s.name.rpartition(".")[0] for s in view.scans if s.moment == "start"]
    return [name for name in dict.fromkeys(names) if name]


def is_everything(control: str, view: RunView) -> bool:
    """Whether ``control`` puts every module of ``view`` in fp32: fp32 training by another name."""
    names = modules_with_parameters(view)
    paths = control.removeprefix("fp32_modules:").split(",")
    return len(names) > 1 and set(paths) == set(names)
