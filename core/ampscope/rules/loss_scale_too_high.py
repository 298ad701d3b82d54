"""Gradients overflow because the loss scale is too high.

What it detects
    Skipped steps with a finite loss that end, or would end, at a lower scale that is still 1 or
    more: an initial value far above the usual, a static scale, growth every few steps, or a factor
    of the script's own that falls no further.

Why it matters
    Every skipped step is a lost step; a static scale that overflows loses them all.

Blind spots
    A search that ends is no fault, however short the run is: 2^32 is a usual start, and only more
    than 16 skips from above it count. Nor is a skip in two thousand steps. Skips to which the scale
    did not grow, and gradients that are not finite in fp32 either, have another cause.

Remedy
    The default initial scale of 2^16 with a growth interval of 2,000, or lower.
"""

from __future__ import annotations

import math

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.scale_facts import (
    MANY_SKIPS,
    ScaleFacts,
    fails_forward,
    fits_unscaled,
    hand_factor_at,
    hand_scale_facts,
    hand_scaled_at,
    part_of_the_loss,
    scale_facts,
    scale_raised,
    scale_set_at,
    scaled_by_hand,
    static_scale,
    steps_at_scale_1,
)
from ampscope.analysis.symptoms import replaces_gradients
from ampscope.control import BASELINE, Control
from ampscope.numerics.formats import FP16
from ampscope.rules.backward_roots import is_overflow
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    inconclusive,
    not_applicable,
    op_verdict,
    passed,
    place,
)

USUAL_INIT = 65536.0  # torch's default


def check(evidence: Evidence) -> Verdict:
    """Found from the trajectory of the scale; a forward failure is excluded. The line is the one
    that sets the scale, where it is known, and not the one whose gradient overflows first."""
    run, facts = evidence.baseline, scale_facts(evidence.baseline)
    if scaled_by_hand(evidence) is not None:
        return _static_scale_overflow(evidence)
    if fails_forward(evidence):
        return passed("The loss itself is not finite; no scale cures that.")
    if hidden := _unseen_by_the_scaler(evidence):
        return hidden
    if facts is None:
        return _by_hand(evidence) or _static_scale_overflow(evidence)
    first, last = facts.first, facts.last
    if facts.largest_taken is None:
        if not steps_at_scale_1(evidence):
            return passed("Every scale overflows: look at the backward pass.")
        if facts.still_falls:
            return inconclusive(
                f"The loss scale was still falling when the run ended, at {last:,.6g}: no step is "
                "taken before the search for it has ended. Watch more steps."
            )
        words = f"is at {last:,.6g} where it cannot fall any further, and every step overflows"
        return _found(evidence, facts, words, 1.0)
    if evidence.fp32 is not None and evidence.fp32.bad_gradient_steps:
        return passed("The gradients are not finite in fp32 either; no scale cures that.")
    if facts.starts_too_high and last >= 1:
        words = (
            f"starts at {first:,.6g} and takes {facts.leading} skipped steps to reach {last:,.6g}"
        )
        return _found(evidence, facts, words, min(USUAL_INIT, last))
    if facts.grows_too_fast and last >= 1 and not run.weights_broken:
        floor = min(run.scales)
        if floor < 1:
            return passed("The scale goes below 1: the loss itself is too large.")
        words = f"grows back into overflow again and again: {facts.late} skips after the search"
        return _found(evidence, facts, words, floor)
    return passed("The scale found its place.")


def _static_scale_overflow(evidence: Evidence) -> Verdict:
    """Found when the script multiplies the loss by a constant of its own, without a scaler, and the
    product, or the gradient that it leads to, overflows."""
    factor, root = static_scale(evidence.baseline), evidence.root
    by_hand = scaled_by_hand(evidence) is not None
    overflows = by_hand or (root is not None and is_overflow(root))
    if factor is None or root is None or not overflows or not evidence.symptoms:
        return not_applicable("No loss was scaled.")
    if not by_hand and part_of_the_loss(evidence) is not None:
        return passed("Nothing divides the gradients by the factor: it is a part of the loss.")
    what = "the product" if by_hand else f"the gradient of {place(root.op)}"
    return op_verdict(
        root,
        f"The loss is multiplied by {factor:,.6g} by hand, and {what} overflows.",
        Fix(
            "change_scale",
            "Use torch.amp.GradScaler: its scale adapts.",
            "scaler = torch.amp.GradScaler(device)\n",
        ),
        (Measurement("static loss scale", factor, None, BASELINE),),
    )


def _unseen_by_the_scaler(evidence: Evidence) -> Verdict | None:
    """The script makes gradients finite that overflow at the loss scale: no step is skipped, and
    the scale never falls."""
    run, root, fp32 = evidence.baseline, evidence.root, evidence.fp32
    if not run.has_scaler or fp32 is None or not replaces_gradients(run, fp32):
        return None
    if root is None or not is_overflow(root) or not root.op.fp32_max:
        return None
    fits = run.scales[0] * FP16.max / root.op.fp32_max
    if fits < 1:
        return None
    better = min(USUAL_INIT, 2.0 ** math.floor(math.log2(fits)))
    return op_verdict(
        root,
        f"Gradients overflow at a loss scale of {run.scales[0]:,.6g}, and the scaler does not"
        " lower it, because it never sees them.",
        Fix(
            "change_scale",
            "Leave gradients that are not finite to the scaler, which skips the step and lowers "
            f"the scale; or start it at {better:,.6g}.",
            f"scaler = torch.amp.GradScaler(device, init_scale={better:g})\n",
            (Control.of(init_scale=better), Control.of(init_scale=max(better / 16, 1.0))),
        ),
        (Measurement("steps with replaced gradients", len(run.replaced_steps), None, BASELINE),),
    )


def _by_hand(evidence: Evidence) -> Verdict | None:
    """A factor that the script multiplies its loss by and adapts itself, judged as a scaler's."""
    facts = hand_scale_facts(evidence.baseline)
    if facts is None:
        return None
    fp32 = None if evidence.fp32 is None else hand_scale_facts(evidence.fp32)
    if fp32 is not None and fp32.skipped:
        return passed("The gradients are not finite in fp32 either; no scale cures that.")
    lost, rise = facts.skipped, ""
    if facts.starts_too_high:
        words = f"starts at {facts.first:,.6g} and loses {facts.leading} steps to {facts.last:,.6g}"
    elif facts.grows_too_fast:
        words = (
            f"grows back into overflow again and again: {facts.late} of {facts.total} steps are "
            "lost after the search"
        )
    elif facts.cannot_fall and fits_unscaled(evidence, facts.first):
        words = (
            f"stays at {facts.last:,.6g}, though {facts.refused} of {facts.total} batches are lost "
            "there to gradients that overflow"
        )
        lost = facts.refused
    elif rise := _rises_unseen(evidence, facts):
        words = rise
    else:
        return passed("The script scales its loss by hand, and its factor found its place.")
    return Verdict(
        Status.FOUND,
        f"The factor by which the script multiplies its loss {words}.",
        phase="backward",
        step=_step_of(evidence) if rise else None if facts.grows_too_fast else 0,
        line=hand_scaled_at(evidence.baseline),
        evidence=(
            *(() if rise else (Measurement("lost steps", lost, MANY_SKIPS, BASELINE),)),
            Measurement("initial factor", facts.first, USUAL_INIT, BASELINE),
            Measurement("factor at the end", facts.last, None, BASELINE),
        ),
        fix=Fix(
            "change_scale",
            "Start the factor at 65,536 or below, halve it after every overflow down to 1, and "
            "double it every 2,000 steps, or let torch.amp.GradScaler do it.",
            "scaler = torch.amp.GradScaler(device)  # in place of the factor and its division\n",
        ),
    )


def _step_of(evidence: Evidence) -> int | None:
    return None if evidence.root is None else evidence.root.op.step


def _rises_unseen(evidence: Evidence, facts: ScaleFacts) -> str:
    """What a factor did that only rises, where a gradient overflows that it alone makes too large,
    and the step is taken all the same; "" of any other."""
    root = evidence.root
    if facts.skipped or root is None or root.op.step is None or not is_overflow(root):
        return ""
    factor = hand_factor_at(evidence.baseline, root.op.step)
    if factor is None or factor <= facts.first or not fits_unscaled(evidence, factor):
        return ""
    return (
        f"rises from {facts.first:,.6g} to {factor:,.6g} at step {root.op.step:,}, where gradients "
        "overflow, and nothing keeps the step from being taken"
    )


def _found(evidence: Evidence, facts: ScaleFacts, words: str, better: float) -> Verdict:
    root, skips, line = evidence.root, evidence.baseline.skips, scale_set_at(evidence.baseline)
    raised, text = scale_raised(evidence.baseline), f"Start at {better:,.6g} and grow every 2,000"
    if raised is not None:
        words += (
            f". The script itself puts it back up to {raised.scale:,.6g} by {raised.how}"
            f"{f' at line {raised.line}' if raised.line else ''}, {raised.count} times"
        )
        text = f"Leave the scale to the scaler after its start, and start at {better:,.6g}: growth "
        text += "every 2,000"
    op = root.op if root is not None and root.op.phase == "backward" and not line else None
    return Verdict(
        Status.FOUND,
        f"The loss scale {words}.",
        module=(op.module or None) if op else None,
        op=op.op if op else None,
        phase="backward",
        step=skips[0] if skips else 0,
        line=op.line if op else line,
        evidence=(
            Measurement("skipped steps", facts.skipped, MANY_SKIPS, BASELINE),
            Measurement("initial scale", facts.first, USUAL_INIT, BASELINE),
            Measurement("scale at the end", facts.last, None, BASELINE),
        ),
        fix=Fix(
            "change_scale",
            f"{text} steps.",
            f"scaler = torch.amp.GradScaler(device, init_scale={better:g}, growth_interval=2000)\n",
            (
                Control.of(init_scale=better, growth_interval=2000),
                Control.of(init_scale=better / 16, growth_interval=2000),
                Control.of(scale=max(better / 16, 1.0)),
            ),
        ),
    )


RULE = Rule(
    code="AMP013",
    id="loss_scale_too_high",
    title="The loss scale is too high",
    definition="Scaled gradients overflow: initial value, static scale, floor, or growth too fast.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=60,
    in_ops=True,
)
