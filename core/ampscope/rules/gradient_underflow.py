"""Gradients underflow to zero.

What it detects
    Gradient entries that are exactly zero and are not zero in the fp32 control, at the same
    weights, while every number is finite: those of a step, those that the script takes by
    torch.autograd.grad, and those that its own cast to fp16 makes zero in a hook or an optimizer.

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

from dataclasses import replace

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.gradient_loss import asked_loss, dead_parameters, late_zero_share
from ampscope.analysis.root_op import silent_suspects
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scale_facts import scaler_made_at, static_scale
from ampscope.analysis.symptoms import Symptom, learns_slower
from ampscope.control import BASELINE, Control
from ampscope.observations import HalfSite, OptimizerStep
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
    if fp32 is None:
        return inconclusive(
            "Only the fp32 control distinguishes a lost gradient from a structural zero."
        )
    if evidence.lost_share is None:
        return inconclusive("No step's gradients could be compared with the fp32 control's.")
    lost = max(evidence.lost_share, late_zero_share(run) - late_zero_share(fp32))
    dead = dead_parameters(run, fp32)
    share = f"{max(lost, 0.0):.1%} of the gradient entries are zero here and not in fp32"
    if evidence.symptoms & {Symptom.LOSS}:
        return passed("The loss is not finite: zero gradients are not the trouble.")
    if not dead and lost < LOST:
        return _asked_for(evidence, fp32) or _cast_away(evidence, fp32) or passed(f"{share}.")
    if _computes_in_fp32(run) and (found := _cast_away(evidence, fp32)) is not None:
        return found  # gradients left the backward pass whole, and no loss scale reaches the cast
    if (saved := _saved_as_zero(run)) is not None:
        what = f"{saved.zeroed:,} of {saved.elements:,} activations that line {saved.line} makes"
        return passed(f"{share}. {what} half for the backward pass became zero before.")
    if any(b.reached_loss is False and b.phase == "forward" for b in silent_suspects(run)):
        return inconclusive("An op overflows inside in most steps; that can make zeros too.")
    counted = next(iter(run.own_gradients), None)
    step = counted.step if counted is not None else 0
    measured = (
        Measurement("zero gradient entries", run.zero_share or 0.0, None, BASELINE, step),
        Measurement("zero gradient entries in fp32", fp32.zero_share or 0.0, None, "fp32", 0),
        Measurement("lost", lost, LOST, BASELINE, step),
    )
    reason = f"{share}, {_scale(run, counted)}."
    if not dead and lost <= LOST_SURELY and not _is_harmed(evidence, lost, fp32):
        return latent(f"{reason} The loss falls as in fp32 so far.", _fix(evidence), *measured)
    return Verdict(
        Status.FOUND,
        f"{reason}{_which(dead)}",
        module=dead[0].rpartition(".")[0] or None if dead else None,
        phase="backward",
        step=step,
        line=scaler_made_at(run) or _backward_line(run),
        evidence=measured,
        fix=_fix(evidence),
    )


def _saved_as_zero(run: RunView) -> HalfSite | None:
    """Where activations become half for the backward pass alone, which no loss scale reaches: by a
    hook on what is saved, or in the forward pass of a function of the script's own."""
    saved = {("saved", "saved activations"), ("function", "activations")}
    lost = (s for s in run.sites if (s.kind, s.role) in saved and s.elements)
    return next((s for s in lost if s.zeroed > LOST * s.elements), None)


def _asked_for(evidence: Evidence, fp32: RunView) -> Verdict | None:
    """Of gradients that the script takes by ``torch.autograd.grad``, which nothing scales: those of
    an inner step, a penalty, an adversarial input."""
    asked = asked_loss(evidence.baseline, fp32)
    if asked is None or asked.lost < LOST:
        return None
    reason = (
        f"{asked.lost:.1%} of the entries of the gradients that line {asked.line} takes by "
        "torch.autograd.grad are zero here and not in fp32: no loss scale applies to them."
    )
    values = (Measurement("lost", asked.lost, LOST, BASELINE, asked.step),)
    if asked.lost <= LOST_SURELY and not _is_harmed(evidence, asked.lost, fp32):
        return latent(f"{reason} The loss falls as in fp32 so far.", ASKED, *values)
    return Verdict(
        Status.FOUND,
        reason,
        phase="backward",
        step=asked.step,
        line=asked.line,
        evidence=values,
        fix=ASKED,
    )


def _cast_away(evidence: Evidence, fp32: RunView) -> Verdict | None:
    """Of gradients that the script itself casts to fp16, in a hook or in its optimizer, after the
    backward pass has kept them. Whether a step uses the copy is not known: it may be a log's."""
    casts = [
        site
        for site in evidence.baseline.sites
        if site.dtype == "fp16"
        and (site.role == "gradients" or (not site.role and _computes_in_fp32(evidence.baseline)))
        and site.kind in ("cast", "state")
        and site.elements
    ]
    worst = max(casts, key=lambda site: site.zeroed / site.elements, default=None)
    if worst is None or worst.zeroed < LOST * worst.elements:
        return None
    lost = worst.zeroed / worst.elements
    reason = f"The cast of gradients to fp16 at line {worst.line} makes zero of {lost:.1%} of them."
    values = (Measurement("lost in the cast", lost, LOST, BASELINE, worst.step),)
    if not _is_harmed(evidence, lost, fp32):
        return latent(f"{reason} The loss falls as in fp32 so far.", DROP, *values)
    return Verdict(
        Status.FOUND,
        reason,
        op=worst.op,
        step=worst.step,
        line=worst.line,
        evidence=values,
        fix=replace(DROP, controls=(Control.of(fp32_lines=worst.line), "bf16")),
    )


def _computes_in_fp32(run: RunView) -> bool:
    """Whether no forward or backward pass computes in half: what is in half, the script cast."""
    outcome = run.outcome
    in_half = {"fp16", "bf16"} & {*outcome.flop_dtypes}
    return not (outcome.uses_autocast or outcome.uses_half_model or in_half)


def _is_harmed(evidence: Evidence, lost: float, fp32: RunView) -> bool:
    """Whether the training shows it."""
    if evidence.symptoms & {Symptom.BEHIND, Symptom.FROZEN}:
        return True
    return lost > LOST_CLEARLY and learns_slower(evidence.baseline, fp32)


def _scale(run: RunView, counted: OptimizerStep | None) -> str:
    """At which scale gradients are lost, as the rest of a sentence."""
    by_hand = static_scale(run)
    if run.has_scaler:
        scale = counted.scale if counted is not None and counted.scaler else run.scales[0]
        return f"at a loss scale of {scale:,.6g}"
    if by_hand is not None:
        return f"at a loss scale by hand of {by_hand:,.6g}"
    return "because the loss is not scaled"


def _fix(evidence: Evidence) -> Fix:
    run = evidence.baseline
    if run.has_scaler and run.leading_skips:  # a larger scale overflowed
        return IN_FP32 if evidence.emulates_bf16 else TOO_WIDE
    if run.has_scaler:
        return RAISE
    return ADD if static_scale(run) is None else RAISE_BY_HAND


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
ASKED_PATCH = """gradients = torch.autograd.grad(loss * 65536, inputs)
gradients = [g.float() / 65536 for g in gradients]
"""
ASKED = Fix(
    "add_scaler",
    "Multiply the output by a power of two before torch.autograd.grad, and divide the gradients by "
    "it.",
    ASKED_PATCH,
    ("bf16",),
)
DROP = Fix("drop_cast", "Keep the gradients in fp32 from the backward pass to the update.")
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
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=70,
    explains=("small_update_lost",),
    is_measured=True,
    in_ops=True,
)
