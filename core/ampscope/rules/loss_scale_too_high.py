"""The loss scale is higher than the gradients bear.

What it detects
    Skipped steps with a finite loss that end, or would end, at a lower scale that is still 1 or
    more: an initial value far above the usual, a static scale, or growth every few steps.

Why it matters
    Every skipped step is a lost step; a static scale that overflows loses them all.

Blind spots
    Six skips from 2^24, or a skip in two thousand steps, are a search and no fault.

Remedy
    The default initial scale of 2^16 with a growth interval of 2,000, or lower.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.rules.backward_root import is_overflow
from ampscope.analysis.scale_facts import (
    ScaleFacts,
    fails_forward,
    scale_facts,
    scaled_by_hand,
    static_scale,
)
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, not_applicable, passed
from ampscope.rules.wording import op_verdict, place

USUAL_INIT = 65536.0  # torch's default
HIGH_INIT = 2.0**24  # a search from here or below is ordinary (DeepSpeed starts at 2^16 to 2^32)
MANY = 12  # skips before the first step: the search started 2^12 or more above what is borne
COSTLY = 0.25  # of the run's steps; 16 skips in 200 are a search that ended, 22 in 60 are a loss
GROWS_TOO_FAST = 0.1  # share of skips after the search; torch's interval gives 0.0005


def check(evidence: Evidence) -> Verdict:
    """Found from the trajectory of the scale; a forward failure is excluded."""
    run = evidence.as_is
    if scaled_by_hand(evidence) is not None:
        return _static(evidence)
    if fails_forward(evidence):
        return passed("The loss itself is not finite; no scale cures that.")
    facts = scale_facts(run)
    if facts is None:
        return _static(evidence)
    if facts.bearable is None:
        if not _bears_one(evidence):
            return passed("No scale was borne at all: look at the backward pass.")
        words = (
            f"is at {facts.last:,.6g} where it cannot fall any further, and every step overflows"
        )
        return _found(evidence, facts, words, 1.0)
    steady = facts.last
    costly = facts.leading >= COSTLY * facts.total
    if facts.leading >= MANY and costly and facts.first > HIGH_INIT and steady >= 1:
        words = (
            f"starts at {facts.first:,.6g} and takes {facts.leading} skipped steps to reach"
            f" {steady:,.6g}"
        )
        return _found(evidence, facts, words, min(USUAL_INIT, steady))
    share = facts.late / max(facts.total - facts.leading, 1)
    if facts.late >= 3 and share > GROWS_TOO_FAST and steady >= 1 and not run.weights_broken:
        floor = min(run.scales)
        if floor < 1:
            return passed("The scale goes below 1: the loss itself is too large.")
        words = f"grows back into overflow again and again: {facts.late} skips after the search"
        return _found(evidence, facts, words, floor)
    return passed("The scale found its place.")


def _bears_one(evidence: Evidence) -> bool:
    low = evidence.runs.get("scale:1")
    return low is not None and len(low.skips) < len(low.attempts) and low.has_scaler


def _static(evidence: Evidence) -> Verdict:
    run = evidence.as_is
    factor = static_scale(run)
    root = evidence.root
    by_hand = scaled_by_hand(evidence) is not None
    overflows = by_hand or (root is not None and is_overflow(root))
    if factor is None or root is None or not overflows or not evidence.symptoms:
        return not_applicable("No loss was scaled.")
    what = "the product" if by_hand else f"the gradient of {place(root.op)}"
    return op_verdict(
        root,
        f"The loss is multiplied by {factor:,.6g} by hand, and {what} overflows.",
        Fix(
            "change_scale",
            "Use torch.amp.GradScaler: its scale adapts.",
            "scaler = torch.amp.GradScaler(device)\n",
        ),
        (Measurement("static loss scale", factor, None, "as_is"),),
    )


def _found(evidence: Evidence, facts: ScaleFacts, words: str, better: float) -> Verdict:
    root = evidence.root
    op = root.op if root is not None and root.op.phase == "backward" else None
    return Verdict(
        Status.FOUND,
        f"The loss scale {words}.",
        module=(op.module or None) if op else None,
        op=op.op if op else None,
        phase="backward",
        step=evidence.as_is.skips[0] if evidence.as_is.skips else 0,
        line=op.line if op else "",
        evidence=(
            Measurement("skipped steps", facts.skipped, MANY, "as_is"),
            Measurement("initial scale", facts.first, USUAL_INIT, "as_is"),
            Measurement("scale at the end", facts.last, None, "as_is"),
        ),
        fix=Fix(
            "change_scale",
            f"Start at {better:,.6g} and grow every 2,000 steps.",
            f"scaler = torch.amp.GradScaler(device, init_scale={better:g}, growth_interval=2000)\n",
            (
                f"init_scale:{better:g};growth_interval:2000",
                f"init_scale:{better / 16:g};growth_interval:2000",
                f"scale:{max(better / 16, 1.0):g}",
            ),
        ),
    )


RULE = Rule("loss_scale_too_high", check, ("as_is", "fp32"), 60)
