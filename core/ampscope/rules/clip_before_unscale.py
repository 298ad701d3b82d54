"""Gradients were clipped while they still carried the loss scale.

What it detects
    clip_grad_norm_ or clip_grad_value_ on gradients of a scaled loss, with no unscale_ before
    it, also of a loss that the script multiplies by a factor of its own; or gradients that the
    script's own code cuts while they are scaled, to one fixed limit or to far less than the same
    code leaves of them in fp32.

Why it matters
    The threshold meets gradients that are 65,536 times too large, so every step is cut to
    almost nothing. Adam hides it in the loss curve.

Blind spots
    Clipping by hand in fewer than three steps, or inside a hook on a tensor. A limit that no
    gradient meets, and gradients that the script divided by the scale itself, are no fault.

Remedy
    scaler.unscale_(optimizer) before the clip.
"""

from __future__ import annotations

import math

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.hand_clips import cut_unlike_fp32, follows_scale, hand_clips
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scale_facts import hand_factor_at
from ampscope.analysis.scaled_gradients import clips_scaled
from ampscope.control import BASELINE
from ampscope.observations import MIN_HAND_SCALE, Call, GradientChange, OptimizerStep
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, not_applicable, passed

MIN_CLIPS = 3  # steps
NEARLY = 0.99  # torch adds 1e-6 to the norm, and half gradients are rounded
BELOW = 0.999  # entries that were cut to the limit are the limit, to rounding


def check(evidence: Evidence) -> Verdict:
    """Found in the call log alone; the curves need not show it."""
    run = evidence.baseline
    if not run.has_scaler:
        return _of_a_factor(run) or not_applicable("No loss was scaled.")
    wrong = [c for c in run.calls if c.name == "clip" and c.scaled and not c.nested]
    wrong = [c for c in wrong if _cuts(run, c)]
    wrong = [c for c in wrong if clips_scaled(run, evidence.fp32, c.line) is not False]
    if not wrong or _follow_scale(run, wrong):
        return _clipped_by_hand(evidence, PATCH) or passed("No scaled gradients were clipped.")
    first = wrong[0]
    clips = [c for c in run.calls if c.name == "clip"]
    scale = next((a.scale for a in run.steps if a.step >= first.step), 0.0)
    return Verdict(
        Status.FOUND,
        f"Line {first.line} clips gradients that are still multiplied by the loss scale"
        f" ({scale:,.6g}), in {len(wrong)} of {len(clips)} clips.",
        step=first.step,
        line=first.line,
        evidence=(
            Measurement("clips of scaled gradients", len(wrong), 0, BASELINE, first.step),
            Measurement(
                "norm that the clip saw",
                first.value if first.value is not None else "not returned",
                float(first.note or 0),
                BASELINE,
                first.step,
            ),
            Measurement("loss scale", scale, 1, BASELINE, first.step),
        ),
        fix=Fix(
            "move_unscale",
            "Call scaler.unscale_(optimizer) before the clip.",
            PATCH,
            ("unscale_first",),
        ),
    )


def _cuts(run: RunView, clip: Call) -> bool:
    """A limit that no gradient meets, such as infinity in order to log the norm, cuts nothing. Nor
    does one cut anything of gradients that are not finite: the scaler leaves that step out."""
    limit = float(clip.note or 0)
    if clip.value is not None:
        return math.isfinite(clip.value) and clip.value > limit
    own = [a for a in run.steps if a.step == clip.step and a.grad_max is not None]
    return math.isfinite(limit) and not any(
        (a.grad_max or 0.0) * a.scale < limit * BELOW for a in own
    )


def _follow_scale(run: RunView, clips: list[Call]) -> bool:
    """The script multiplied the limits by the scale itself."""
    scales = {a.step: a.scale for a in run.steps}
    pairs = [(float(c.note), scales[c.step]) for c in clips if c.note and c.step in scales]
    return len(pairs) > 1 and follows_scale(*zip(*pairs, strict=True))


def _of_a_factor(run: RunView) -> Verdict | None:
    """Found where the script multiplies its loss by a constant, clips what backward left of that,
    and divides by the constant afterwards: the limit over it is all that the step gets."""
    found: list[tuple[Call, OptimizerStep, float]] = []
    for own in (a for a in run.steps if a.backward_norm and a.grad_norm):
        factor = hand_factor_at(run, own.step)
        for clip in (c for c in run.calls if c.name == "clip" and c.step == own.step):
            limit, norm = float(clip.note or 0), clip.value
            if factor is None or factor < MIN_HAND_SCALE or norm is None or not norm > limit > 0:
                continue
            left = limit / factor
            if _is_about(norm, own.backward_norm) and _is_about(own.grad_norm, left):
                found.append((clip, own, factor))
    if len(found) < MIN_CLIPS:
        return None
    clip, own, factor = found[0]
    return Verdict(
        Status.FOUND,
        f"Line {clip.line} clips gradients that are still multiplied by the factor by which the "
        f"script multiplies its loss ({factor:,.6g}), in {len(found)} steps: the division that "
        f"comes after it leaves a norm of {own.grad_norm:.3g}.",
        step=own.step,
        line=clip.line,
        evidence=(
            Measurement("clips of scaled gradients", len(found), 0, BASELINE, own.step),
            Measurement(
                "norm that the clip saw",
                clip.value or 0.0,
                float(clip.note or 0),
                BASELINE,
                own.step,
            ),
            Measurement("factor of the loss", factor, 1, BASELINE, own.step),
        ),
        fix=Fix("move_unscale", "Divide the gradients by the factor before the clip.", DIVISION),
    )


def _is_about(value: float | None, expected: float | None) -> bool:
    return bool(value and expected) and abs((value or 0) / (expected or 1) - 1) <= 1 - NEARLY


DIVISION = """for p in model.parameters():
    p.grad.div_(factor)
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
"""


def _clipped_by_hand(evidence: Evidence, patch: str) -> Verdict | None:
    """Found where a script clips gradients with code of its own while they still carry the loss
    scale; None when no limit shows in what it did to them."""
    run = evidence.baseline
    if clips := hand_clips(run.gradient_changes):
        clip = clips[0]
        did = f"cuts the {clip.bounds} of gradients that are still multiplied by the loss scale"
        steps = Measurement("steps cut to one limit", len(clip.changes), 0, BASELINE)
        return _found_by_hand(did, f"to {clip.limit:.4g}", clip.changes, clip.limit, steps, patch)
    if cuts := cut_unlike_fp32(run, evidence.fp32):
        after = cuts[0].norm_after
        did = "limits gradients that are still multiplied by the loss scale"
        rest = f"and leaves {after / cuts[0].norm_before:.2g} of them, which fp32 keeps"
        steps = Measurement("first steps in which fp32 cuts less", len(cuts), 0, BASELINE)
        return _found_by_hand(did, rest, cuts, after, steps, patch)
    return None


def _found_by_hand(
    did: str,
    rest: str,
    changes: tuple[GradientChange, ...],
    limit: float,
    steps: Measurement,
    patch: str,
) -> Verdict:
    first = changes[0]
    where = f"Line {first.line}" if first.line else "The script"
    return Verdict(
        Status.FOUND,
        f"{where} {did} ({first.scale:,.6g}) {rest}, in {len(changes)} steps.",
        step=first.step,
        line=first.line,
        evidence=(
            steps,
            Measurement("norm before the clip", first.norm_before, limit, BASELINE, first.step),
            Measurement("loss scale", first.scale, 1, BASELINE, first.step),
        ),
        fix=Fix("move_unscale", "Call scaler.unscale_(optimizer) before the clip.", patch),
    )


def is_removed(before: RunView, after: RunView) -> bool:
    """Whether the clip meets smaller norms, or, where none was recorded, lets updates through: the
    call itself is seen in both runs."""
    # Of the first step that has one: the norm of a step that is skipped may be infinite.
    norms = [
        next((c.value for c in run.calls if c.name == "clip" and _is_finite(c.value)), None)
        for run in (before, after)
    ]
    if norms[0] is not None and norms[1] is not None:
        return norms[1] < norms[0] / 2
    moved = [next((a.update_norm for a in r.steps if a.update_norm), 0.0) for r in (before, after)]
    return (moved[1] or 0.0) > 2 * (moved[0] or 0.0)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


PATCH = """scaler.scale(loss).backward()
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
scaler.step(optimizer)
scaler.update()
"""


RULE = Rule(
    code="AMP015",
    id="clip_before_unscale",
    title="Gradients were clipped before unscale_",
    definition="The clipping threshold was compared with gradients that still carry the loss "
    "scale.",
    check=check,
    needs=(BASELINE,),
    order=30,
    explains=("gradient_underflow", "small_update_lost", "not_amp_divergence"),
    is_removed=is_removed,
)
