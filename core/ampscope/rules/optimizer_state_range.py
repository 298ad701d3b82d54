"""The optimizer's state leaves the range of half precision.

What it detects
    Optimizer state in half, finite gradients, and then weights that are not finite, steps far
    larger than in fp32, or second moments that vanished; an epsilon that rounds to zero. Latent:
    second moments that never fall, because their decay rounds back to the same number.
    State in fp32 that came back through half, as out of a checkpoint that stores it so: second
    moments that are zero although their first moments are not, the leap of the next step, and a
    loss that rises behind it. Latent: the leap without the rise.

Why it matters
    Adam divides by sqrt(v) + eps; in fp16 both can be zero. A moment that cannot fall keeps steps
    small once gradients have become smaller.

Blind spots
    State kept by code of the script's own. Where the optimizer's options name no decay, moments
    that cannot fall are told after 20 steps without one that fell.

Remedy
    fp32 parameters (and so fp32 state), or an epsilon of 1e-4. Store the state of an optimizer in
    fp32; in bf16 its second moments keep their range.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.half_optimizer_state import (
    FALLS,
    LEAPS,
    MIN_LOST,
    RIGID,
    TOO_LARGE,
    HalfState,
    LostDecay,
    RoundTrip,
    half_state,
    optimizer_class,
    round_trip,
)
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom
from ampscope.control import BASELINE, Control
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

MOSTLY_DEAD = 0.5  # below that, updates that are too small are the simpler reason to stand still


def check(evidence: Evidence) -> Verdict:
    """Found at the first steps, where both runs still have the same weights."""
    state = half_state(evidence.baseline, evidence.fp32)
    if (trip := round_trip(evidence.baseline, evidence.fp32)) is not None:
        return _came_back(trip, evidence.baseline)
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


def _came_back(trip: RoundTrip, run: RunView) -> Verdict:
    """Moments that lost their range on the way to a file, or another copy, and back."""
    first = trip.first
    kind = optimizer_class(run, first.optimizer)
    name = f"the optimizer ({kind})" if kind else "the optimizer"
    casts = [s for s in run.sites if s.role == "moments" and s.zeroed + s.infinite]
    casts = [s for s in casts if s.step <= first.step and s.dtype in first.written_in]
    loads = [c for c in run.calls if c.name == "load_state" and c.step <= first.step]
    cast = casts[-1].line if casts else ""
    loaded = loads[-1].line if loads else ""
    share = first.written_zero_share or 0.0
    lost = [f"{share:.1%} of its second moments are zero"] if share >= MIN_LOST else []
    if first.state_nonfinite:
        lost.append(f"{first.state_nonfinite:,} of its numbers are not finite")
    reason = (
        f"The state of {name} came back as numbers of {first.written_in}"
        + (f", loaded at {loaded}" if loaded else "")
        + (f" and rounded at {cast}" if cast else "")
        + f": {' and '.join(lost)} at step {first.step:,}, although its gradients are not."
    )
    values = [
        Measurement("second moments that are zero", share, MIN_LOST, BASELINE, first.step),
        Measurement("numbers that are not finite", first.state_nonfinite, 0, BASELINE, first.step),
    ]
    if trip.leap is not None:
        reason += f" The update of that step is {trip.leap:,.3g} times {trip.beside}."
        name = f"update norm over {trip.beside}"
        values.append(Measurement(name, trip.leap, LEAPS, BASELINE, first.step))
    if trip.loss_after is not None:
        reason += f" The loss rises from {trip.loss_before:.3g} to {trip.loss_after:.3g}."
        loss = Measurement("loss after it", trip.loss_after, trip.loss_before, BASELINE)
        values.append(loss)
    fix = Fix(
        "fp32_optimizer_state",
        "Store the optimizer's state in fp32, at least its second moments; or in bf16, which has "
        "their range.",
        "state = optimizer.state_dict()  # as it is, without a cast to half\n",
        (Control.of(fp32_lines=cast),) if cast else (),
    )
    return Verdict(
        Status.FOUND if trip.harms else Status.LATENT,
        reason,
        phase="step",
        step=first.step,
        line=cast or loaded,
        evidence=tuple(values),
        fix=fix,
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
    is_measured=True,
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
