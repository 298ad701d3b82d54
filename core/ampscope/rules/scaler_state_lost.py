"""Training resumed with a fresh scaler.

What it detects
    A checkpoint that is loaded, a scaler that was created and whose load_state_dict is never
    called (or that of another scaler is), and a scale that jumps back to its initial value, with a
    burst of skips.

Why it matters
    The scale that training had found is lost; the steps after the resume are skipped or
    unstable.

Blind spots
    A resume in which the fresh scale happens to fit; a checkpoint of an earlier process that
    holds no scaler state, which looks like pretrained weights.

Remedy
    Save scaler.state_dict() with the checkpoint, and load it.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
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

JUMP = 8.0  # the fresh scale over the last one before


def check(evidence: Evidence) -> Verdict:
    """Found from the log: load, no load_state_dict, and the scale's jump or a burst of skips."""
    run = evidence.baseline
    loads = [c for c in run.calls if c.name == "load" and not c.nested]
    if not loads or not run.has_scaler:
        return not_applicable("Nothing was resumed under a scaler.")
    load = loads[-1]
    later = [c for c in run.calls if c.seq > load.seq]
    restored = {c.subject for c in later if c.name == "scaler_load_state_dict"}
    used = {c.subject for c in later if c.name == "scale"}
    if not used:
        return passed("Nothing was trained with a scaler after the load.")
    if restored & used:
        return passed("The scaler's state was restored.")
    before = [a.scale for a in run.attempts if a.scaler and a.attempt < load.attempt]
    after = [a for a in run.attempts if a.scaler and a.attempt >= load.attempt]
    if not after:
        return passed("No step followed the load.")
    burst = 0
    while burst < len(after) and after[burst].skipped:
        burst += 1
    jump = after[0].scale / before[-1] if before and before[-1] else None
    jumped = jump is not None and jump >= JUMP
    had_state = load.note == "with scaler state"
    if not before and not had_state and burst:
        # Pretrained weights come without a scaler, and a new scaler searches for its scale.
        return inconclusive("Nothing was trained before the load: it may be no resume.")
    if not jumped and (before or not (had_state and burst)):
        return passed("The scale did not jump at the load.")
    values = [
        Measurement("skips right after the load", burst, 0, "as_is", load.attempt),
        Measurement("checkpoint", load.note, "with scaler state", "as_is", load.attempt),
    ]
    if jump is not None:
        values.append(
            Measurement("scale after the load over scale before", jump, JUMP, "as_is", load.attempt)
        )
    return Verdict(
        Status.FOUND,
        f"Line {load.line} resumes training, and the scaler starts anew at {after[0].scale:,.6g}"
        + (f" instead of {before[-1]:,.6g}" if before else "")
        + (f"; {burst} steps are skipped." if burst else ".")
        + (ANOTHER if restored else ""),
        step=load.attempt,
        line=load.line,
        evidence=tuple(values),
        fix=Fix(
            "save_scaler_state", "Save the scaler's state with the checkpoint, and load it.", PATCH
        ),
    )


ANOTHER = " The saved state was loaded into another scaler, which scales nothing after that."
PATCH = """torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, path)
scaler.load_state_dict(checkpoint["scaler"])
"""


RULE = Rule(
    "scaler_state_lost",
    check,
    ("as_is",),
    33,
    explains=("loss_scale_too_high", "loss_magnitude_overflow"),
)
