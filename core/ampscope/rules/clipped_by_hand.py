"""The verdict on scaled gradients that a script clips with code of its own."""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.scaled_gradients import cut_unlike_fp32, hand_clips
from ampscope.observations import GradientChange
from ampscope.rules.verdict import Fix, Measurement, Status, Verdict


def clipped_by_hand(evidence: Evidence, patch: str) -> Verdict | None:
    """None when no limit shows in what the script did to its gradients."""
    run = evidence.baseline
    if clips := hand_clips(run.gradient_changes):
        clip = clips[0]
        did = f"cuts the {clip.bounds} of gradients that are still multiplied by the loss scale"
        steps = Measurement("steps cut to one limit", len(clip.changes), 0, "as_is")
        return _found(did, f"to {clip.limit:.4g}", clip.changes, clip.limit, steps, patch)
    if cuts := cut_unlike_fp32(run, evidence.fp32):
        after = cuts[0].norm_after
        did = "limits gradients that are still multiplied by the loss scale"
        rest = f"and leaves {after / cuts[0].norm_before:.2g} of them, which fp32 keeps"
        steps = Measurement("first steps in which fp32 cuts less", len(cuts), 0, "as_is")
        return _found(did, rest, cuts, after, steps, patch)
    return None


def _found(
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
        step=first.attempt,
        line=first.line,
        evidence=(
            steps,
            Measurement("norm before the clip", first.norm_before, limit, "as_is", first.attempt),
            Measurement("loss scale", first.scale, 1, "as_is", first.attempt),
        ),
        fix=Fix("move_unscale", "Call scaler.unscale_(optimizer) before the clip.", patch),
    )
