"""Gradients underflow to zero.

What it detects
    Gradient entries that are exactly zero and are not zero in the fp32 control, at the same
    weights, while every number is finite.

Why it matters
    Those parameters do not learn, and nothing says so: the loss just flattens early.

Blind spots
    Zeros of ReLU, padding and unused rows are in fp32 too and are subtracted; a difference in
    which rows are used would be counted.

Remedy
    A GradScaler; a larger initial scale; bf16, which has the range of fp32.
"""

from __future__ import annotations

import math

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import silent_suspects
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, progress
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    inconclusive,
    not_applicable,
    passed,
)

LOST = 0.05  # of all gradient entries; a healthy scaler loses less than 0.001
MATTERS = 1e-2  # of the whole gradient's norm
LOST_SURELY = 0.9  # without a look at the loss curve: hardly anything learns
LOST_CLEARLY, SLOWER = (
    0.2,
    0.85,
)  # lost share at which slower progress than fp32's is put down to it


def check(evidence: Evidence) -> Verdict:
    """Found by exact zeros beyond those of fp32, unless an internal overflow makes them."""
    run, fp32 = evidence.as_is, evidence.fp32
    if not evidence.uses_half:
        return not_applicable("The script computes nothing in half precision.")
    lost = evidence.lost_share
    if fp32 is None or lost is None:
        return inconclusive("Only the fp32 control tells a lost gradient from a structural zero.")
    late = _late_share(run) - _late_share(fp32)
    dead = _dead_parameters(run, fp32)
    worst = max(lost, late)
    harmed = bool(evidence.symptoms & {Symptom.BEHIND, Symptom.FROZEN}) or (
        worst > LOST_CLEARLY and _is_slower(run, fp32)
    )
    if not dead and (worst < LOST or not (harmed or worst > LOST_SURELY)):
        return passed(
            f"{max(worst, 0.0):.2%} of the gradient entries are zero here and not in fp32."
        )
    if evidence.root is not None and evidence.symptoms & {Symptom.LOSS}:
        return passed("The loss is not finite: zero gradients are not the trouble.")
    if any(b.reached_loss is False and b.phase == "forward" for b in silent_suspects(run)):
        return inconclusive("An op overflows inside in most steps; that can make zeros too.")
    scaler = run.has_scaler
    scale = run.scales[0] if run.scales else 1.0
    controls = ("init_scale:65536",) if scaler else ("add_scaler",)
    kind = "change_scale" if scaler else "add_scaler"
    words = f"at a loss scale of {scale:,.6g}" if scaler else "because the loss is not scaled"
    which = (
        f" Nothing arrives at {dead[0]}" + (f" and {len(dead) - 1} more." if dead[1:] else ".")
        if dead
        else ""
    )
    return Verdict(
        Status.FOUND,
        f"{worst:.1%} of the gradient entries are zero here and not in fp32, {words}.{which}",
        module=dead[0].rpartition(".")[0] or None if dead else None,
        phase="backward",
        step=0,
        evidence=(
            Measurement("zero gradient entries", run.zero_share or 0.0, None, "as_is", 0),
            Measurement("zero gradient entries in fp32", fp32.zero_share or 0.0, None, "fp32", 0),
            Measurement("lost", worst, LOST, "as_is", 0),
        ),
        fix=Fix(
            kind,
            "Scale the loss with a GradScaler." if not scaler else "Use a larger loss scale.",
            PATCH,
            (*controls, "bf16"),
        ),
    )


PATCH = """scaler = torch.amp.GradScaler(device)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""


def _dead_parameters(run: RunView, fp32: RunView) -> list[str]:
    """Parameters without any gradient here that in fp32 have a part of it that matters.

    A bias before a normalisation has a gradient of rounding noise in fp32 and none in half: the
    share of the total norm tells it from a loss.
    """
    reference = {(g.attempt, g.name): g for g in fp32.gradients if g.norm}
    total = math.sqrt(sum((g.norm or 0.0) ** 2 for g in fp32.gradients if g.attempt == 0))
    names = []
    for own in (g for g in run.gradients if g.attempt == 0 and g.total and not g.nonfinite):
        other = reference.get((0, own.name))
        gone = own.zero == own.total
        if (
            gone
            and other is not None
            and other.zero < 0.1 * other.total
            and (other.norm or 0) > MATTERS * total
        ):
            names.append(own.name)
    return names


def _is_slower(run: RunView, fp32: RunView) -> bool:
    count = min(len(run.losses), len(fp32.losses))
    own, reference = progress(run, count), progress(fp32, count)
    return bool(reference and reference > 0 and (own is None or own < SLOWER * reference))


def _late_share(run: RunView) -> float:
    seen = [a for a in run.attempts if not a.grad_nonfinite and a.grad_total][-5:]
    total = sum(a.grad_total for a in seen)
    return sum(a.grad_zero for a in seen) / total if total else 0.0


RULE = Rule("gradient_underflow", check, ("as_is", "fp32"), 70, explains=("small_update_lost",))
