"""The verdict on scaled gradients that a script clips with code of its own."""

from __future__ import annotations

from ampscope.analysis.hand_clip import hand_clips
from ampscope.analysis.run_view import RunView
from ampscope.rules.verdict import Fix, Measurement, Status, Verdict


def clipped_by_hand(run: RunView, patch: str) -> Verdict | None:
    """None when no limit shows in what the script did to its gradients."""
    clips = hand_clips(run.gradient_changes)
    if not clips:
        return None
    clip, first = clips[0], clips[0].changes[0]
    where = f"Line {first.line}" if first.line else "The script"
    return Verdict(
        Status.FOUND,
        f"{where} cuts the {clip.bounds} of gradients that are still multiplied by the loss scale"
        f" ({first.scale:,.6g}) to {clip.limit:.4g}, in {len(clip.changes)} steps.",
        step=first.attempt,
        line=first.line,
        evidence=(
            Measurement("steps cut to one limit", len(clip.changes), 0, "as_is", first.attempt),
            Measurement("norm before the clip", first.norm_before, clip.limit, "as_is",
                        first.attempt),
            Measurement("loss scale", first.scale, 1, "as_is", first.attempt),
        ),
        fix=Fix("move_unscale", "Call scaler.unscale_(optimizer) before the clip.", patch),
    )  # fmt: skip
