"""Gradients underflow to zero.

What it detects
    Gradient entries that are exactly zero and are not zero in the fp32 control, at the same
    weights, while every number is finite.

Why it matters
    Those parameters do not learn, and nothing says so: the loss just flattens early. While the
    loss still falls as in fp32 the loss of gradients is latent.

Blind spots
    Zeros of ReLU, padding and unused rows are in fp32 too and are subtracted; a difference in
    which rows are used would be counted. A run in bf16 alone is not judged: its range is fp32's,
    and what it loses it loses to rounding.

Remedy
    A GradScaler; a larger initial scale; bf16, which has the range of fp32.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import silent_suspects
from ampscope.analysis.run_view import RunView
from ampscope.analysis.skips import scaler_made_at, static_scale
from ampscope.analysis.symptoms import Symptom, dead_parameters, late_zero_share, learns_slower
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

LOST = 0.05  # of all gradient entries; a healthy scaler loses less than 0.001
LOST_SURELY = 0.5  # without a look at the loss curve: most entries carry nothing
LOST_CLEARLY = 0.2  # lost share at which slower progress than fp32's is put down to it


def check(evidence: Evidence) -> Verdict:
    """Found by exact zeros beyond those of fp32, unless an internal overflow makes them."""
    run, fp32 = evidence.baseline, evidence.fp32
    if not evidence.uses_half:
        return not_applicable("The script computes nothing in half precision.")
    if evidence.has_the_range_of_fp32:
        return not_applicable(
            "bf16 has the range of fp32: zeros that fp32 has not are sums that cancelled or a ReLU "
            "that switched otherwise, and no loss scale changes them."
        )
    lost = evidence.lost_share
    if fp32 is None:
        return inconclusive(
            "Only the fp32 control distinguishes a lost gradient from a structural zero."
        )
    if lost is None:
        return inconclusive("No step's gradients could be compared with the fp32 control's.")
    worst = max(lost, late_zero_share(run) - late_zero_share(fp32))
    dead = dead_parameters(run, fp32)
    harmed = bool(evidence.symptoms & {Symptom.BEHIND, Symptom.FROZEN}) or (
        worst > LOST_CLEARLY and learns_slower(run, fp32)
    )
    said = f"{max(worst, 0.0):.1%} of the gradient entries are zero here and not in fp32"
    if not dead and worst < LOST:
        return passed(f"{said}.")
    if evidence.symptoms & {Symptom.LOSS}:
        return passed("The loss is not finite: zero gradients are not the trouble.")
    if any(b.reached_loss is False and b.phase == "forward" for b in silent_suspects(run)):
        return inconclusive("An op overflows inside in most steps; that can make zeros too.")
    counted = next(iter(run.own_gradients), None)
    step = counted.step if counted is not None else 0
    by_hand = static_scale(run)
    words = "because the loss is not scaled"
    if run.has_scaler:
        scale = counted.scale if counted is not None and counted.scaler else run.scales[0]
        words = f"at a loss scale of {scale:,.6g}"
    elif by_hand is not None:
        words = f"at a loss scale by hand of {by_hand:,.6g}"
    fix = RAISE if run.has_scaler else ADD if by_hand is None else RAISE_BY_HAND
    if run.has_scaler and run.leading_skips:
        fix = IN_FP32 if evidence.emulates_bf16 else TOO_WIDE
    measured = (
        Measurement("zero gradient entries", run.zero_share or 0.0, None, "as_is", step),
        Measurement("zero gradient entries in fp32", fp32.zero_share or 0.0, None, "fp32", 0),
        Measurement("lost", worst, LOST, "as_is", step),
    )
    if not dead and not harmed and worst <= LOST_SURELY:
        return latent(f"{said}, {words}. The loss falls as in fp32 so far.", fix, *measured)
    return Verdict(
        Status.FOUND,
        f"{said}, {words}.{_which(dead)}",
        module=dead[0].rpartition(".")[0] or None if dead else None,
        phase="backward",
        step=step,
        line=scaler_made_at(run) or _backward_line(run),
        evidence=measured,
        fix=fix,
    )


def _backward_line(run: RunView) -> str:
    """The first backward pass of the script."""
    return next((c.line for c in run.calls if c.name == "backward"), "")


def _which(dead: list[str]) -> str:
    more = f" and {len(dead) - 1} more" if dead[1:] else ""
    return f" Nothing arrives at {dead[0]}{more}." if dead else ""


PATCH = """scaler = torch.amp.GradScaler(device)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""
RAISE = Fix("change_scale", "Use a larger loss scale.", PATCH, ("init_scale:65536", "bf16"))
TOO_WIDE = Fix(
    "use_bf16",
    "Use bf16: the scaler came down to this scale because a larger one overflows.",
    "with torch.autocast(device, dtype=torch.bfloat16):  # and no GradScaler\n"
    "    loss = loss_fn(model(x), y)\n",
    ("bf16",),
)
IN_FP32 = Fix(
    "rewrite_op",
    "Compute in fp32 what overflows at a larger loss scale, then raise the scale: it came down to "
    "this one because of that.",
    "with torch.autocast(device, enabled=False):\n"
    "    ...  # what overflows, with its inputs as x.float()\n",
)
RAISE_BY_HAND = Fix(
    "change_scale",
    "Use a larger factor, or torch.amp.GradScaler in its place.",
    PATCH,
    ("add_scaler", "bf16"),
)
ADD = Fix("add_scaler", "Scale the loss with a GradScaler.", PATCH, ("add_scaler", "bf16"))


RULE = Rule(
    code="AMP012",
    id="gradient_underflow",
    title="Gradients underflowed to zero",
    definition="Gradients fell below the smallest half-precision number: no scaler, or too small a "
    "scale.",
    check=check,
    needs=("as_is", "fp32"),
    needs_ops=False,
    order=70,
    explains=("small_update_lost",),
    is_measured=True,
    in_ops=True,
)
