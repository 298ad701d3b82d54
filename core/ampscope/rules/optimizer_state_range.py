"""The optimizer's state leaves the range of half precision.

What it detects
    Optimizer state in half, finite gradients, and then weights that are not finite, steps far
    larger than in fp32, or second moments that vanished; an epsilon that rounds to zero. Latent:
    second moments that never fall, because their decay rounds back to the same number.

Why it matters
    Adam divides by sqrt(v) + eps; in fp16 both can be zero. A moment that cannot fall keeps steps
    small once gradients have become smaller.

Blind spots
    State kept by code of the script's own. Where the optimizer's options name no decay, moments
    that cannot fall are told after 20 steps without one that fell.

Remedy
    fp32 parameters (and so fp32 state), or an epsilon of 1e-4.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.half_optimizer_state import (
    FALLS,
    RIGID,
    HalfState,
    LostDecay,
    half_state,
    optimizer_class,
)
from ampscope.analysis.symptoms import Symptom
from ampscope.control import BASELINE
from ampscope.numerics.formats import FORMATS, FP16
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    inconclusive,
    latent,
    not_applicable,
    passed,
)

TOO_LARGE = 10.0  # update norm over the fp32 control's, in the first steps
MOSTLY_DEAD = 0.5  # below that, updates that are too small are the simpler reason to stand still


def check(evidence: Evidence) -> Verdict:
    """Found at the first steps, where both runs still have the same weights."""
    state = half_state(evidence.baseline, evidence.fp32)
    if state is None:
        return not_applicable("No optimizer keeps its state in half precision.")
    if state.broken is None and not evidence.symptoms:
        return _cannot_fall(state) or passed("Training with half-precision state went well.")
    frozen = state.dead_share > MOSTLY_DEAD and Symptom.FROZEN in evidence.symptoms
    exploded = (state.update_ratio or 0.0) > TOO_LARGE
    if state.broken is None and not exploded and not frozen:
        return _cannot_fall(state) or passed("Steps are as large as in fp32.")
    if evidence.fp32_fails_first:
        return inconclusive("fp32 fails as early.")
    first, eps = state.first, state.first.eps
    kind = optimizer_class(evidence.baseline, first.optimizer)
    name = f"the optimizer ({kind})" if kind else "the optimizer"
    vanished = f"; eps = {eps:g} is 0 in fp16" if state.eps_vanished else ""
    values = [
        Measurement("dtype of the state", first.state_dtypes, "fp32", BASELINE, first.step),
        Measurement("second moments that vanished", state.dead_share, MOSTLY_DEAD, BASELINE),
    ]
    if eps is not None:
        values.append(Measurement("eps", eps, FP16.min_subnormal, BASELINE))
    if (ratio := state.update_ratio) is not None:
        values.append(Measurement("update norm over fp32's", ratio, TOO_LARGE, BASELINE))
    return Verdict(
        Status.FOUND,
        f"The state of {name} is {first.state_dtypes}: {_what(state)}{vanished}.",
        phase="step",
        step=(state.broken or first).step,
        evidence=tuple(values),
        fix=_fix(kind, eps),
    )


def _cannot_fall(state: HalfState) -> Verdict | None:
    """Second moments that cannot fall, while the training does as well as in fp32."""
    lost, dtype = state.lost_decay, state.first.state_dtypes
    if lost is None:
        return None
    numbers: tuple[Measurement, ...]
    if lost.due is None or lost.done is None:
        seen = f"none of them fell in {lost.steps:,} steps: the decay v * beta rounds back to v"
        numbers = (Measurement("steps without a moment that fell", lost.steps, RIGID, BASELINE),)
    else:
        seen = (
            f"{1 - max(lost.done, 0.0) / lost.due:.0%} of their decay was lost in {lost.steps:,} "
            f"steps: {_arithmetic(lost, dtype)}"
        )
        numbers = (
            Measurement(
                "decay of sampled moments, in spacings", lost.done, FALLS * lost.due, BASELINE
            ),
            Measurement("exact decay, in spacings", lost.due, None, BASELINE),
        )
    return latent(
        f"The optimizer's second moments are {dtype}, and {seen}. Once gradients become smaller, "
        "steps stay as small as for the largest gradients so far.",
        Fix(
            "fp32_optimizer_state",
            "Keep the optimizer's state in fp32, or use an optimizer with stochastic rounding.",
            "optimizer = torch.optim.AdamW(model.float().parameters(), lr=lr)\n",
            ("fp32_state", "fp32_params"),
        ),
        Measurement("dtype of the state", dtype, "fp32", BASELINE, state.first.step),
        *numbers,
    )


def _arithmetic(lost: LostDecay, dtype: str) -> str:
    """Why the format loses it. Numbers of a format are 2^-(m+1) to 2^-m of their value apart below
    it, and a fall of less than half of that rounds back."""
    half = next((FORMATS[name] for name in dtype.split("+") if name in ("bf16", "fp16")), FP16)
    rate = 1 - (lost.decay or 0.0)
    smallest = half.epsilon / 4
    said = f"beta = {lost.decay:g} takes {rate:.2g} of v off at a step"
    if rate <= smallest:
        return f"{said}, and {half.name} rounds less than {smallest:.2g} of any number back"
    return f"{said}, which is below half the spacing of {half.name} at most of these values"


def _what(state: HalfState) -> str:
    if (broken := state.broken) is not None:
        which = "the weights" if broken.weight_nonfinite else "its moments"
        return f"{which} are not finite after step {broken.step} although its gradients are"
    if (state.update_ratio or 0.0) > TOO_LARGE:
        return f"its steps are {state.update_ratio:,.3g} times those of fp32"
    return f"{state.dead_share:.1%} of its second moments vanished"


def _fix(kind: str, eps: float | None) -> Fix:
    """An epsilon is advice for the optimizers that have one."""
    made = f"torch.optim.{kind or 'AdamW'}(model.float().parameters(), lr=lr)"
    return Fix(
        "fp32_optimizer_state",
        "Keep parameters and state in fp32" + ("." if eps is None else "; or use eps=1e-4."),
        f"optimizer = {made}  # autocast the forward\n",
        ("fp32_state", "fp32_params", *(() if eps is None else ("eps:0.0001",))),
    )


RULE = Rule(
    code="AMP023",
    id="optimizer_state_range",
    title="Optimizer state left the half-precision range",
    definition="A moment or the epsilon of the optimizer underflows, overflows or stagnates in "
    "half precision.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=38,
    explains=(
        "small_update_lost",
        "activation_overflow",
        "elementwise_overflow",
        "reduction_overflow",
        "gradient_underflow",
        "loss_magnitude_overflow",
        "log_zero_saturation",
        "norm_eps_underflow",
    ),
)
