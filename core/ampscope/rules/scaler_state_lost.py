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

import math
from dataclasses import dataclass, field

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.observations import Call
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
STATE = "with scaler state"  # the note of a load that brings one


def check(evidence: Evidence) -> Verdict:
    """Found from the log: load, no load_state_dict, and the scale's jump or a burst of skips. Every
    resume counts: after the last one the script may train no more."""
    run = evidence.baseline
    if not run.has_scaler or not any(c.name == "load" and not c.nested for c in run.calls):
        return not_applicable("Nothing was resumed under a scaler.")
    answers = [_judged(run, resume) for resume in _resumes(run)]
    if not answers:
        return passed("Nothing was trained with a scaler after the load.")
    return next((a for a in answers if a.status is Status.FOUND), answers[-1])


@dataclass(slots=True)
class _Resume:
    """A load, or several with no training between them; ``load`` is the last one, or the last that
    brought a scaler's state. ``later``: all calls from the first one to the next resume."""

    load: Call
    later: list[Call] = field(default_factory=list)
    until: float = math.inf  # the step at which the next one begins


def _resumes(run: RunView) -> list[_Resume]:
    """Those after which losses were scaled."""
    found: list[_Resume] = []
    trained = True
    for call in run.calls:
        is_load = call.name == "load" and not call.nested
        if is_load and trained:
            if found:
                found[-1].until = call.step
            found.append(_Resume(call))
            trained = False
        elif is_load and (call.note == STATE or found[-1].load.note != STATE):
            found[-1].load = call
        trained = trained or call.name == "scale"
        if found:
            found[-1].later.append(call)
    return [resume for resume in found if any(c.name == "scale" for c in resume.later)]


def _judged(run: RunView, resume: _Resume) -> Verdict:
    load, later = resume.load, resume.later
    restored = {c.subject for c in later if c.name == "scaler_load_state_dict"}
    used = {c.subject for c in later if c.name == "scale"}
    if restored & used:
        return passed("The scaler's state was restored.")
    before = [a.scale for a in run.steps if a.scaler and a.step < load.step]
    after = [a for a in run.steps if a.scaler and load.step <= a.step < resume.until]
    if not after:
        return passed("No step followed the load.")
    burst = 0
    while burst < len(after) and after[burst].skipped:
        burst += 1
    jump = after[0].scale / before[-1] if before and before[-1] else None
    jumped = jump is not None and jump >= JUMP
    had_state = load.note == STATE
    if not before and not had_state and burst:
        # Pretrained weights come without a scaler, and a new scaler searches for its scale.
        return inconclusive("Nothing was trained before the load: it may be no resume.")
    if not jumped and (before or not (had_state and burst)):
        return passed("The scale did not jump at the load.")
    values = [
        Measurement("skips right after the load", burst, 0, "as_is", load.step),
        Measurement("checkpoint", load.note, STATE, "as_is", load.step),
    ]
    if jump is not None:
        values.append(
            Measurement("scale after the load over scale before", jump, JUMP, "as_is", load.step)
        )
    return Verdict(
        Status.FOUND,
        f"Line {load.line} resumes training, and the scaler starts anew at {after[0].scale:,.6g}"
        + (f" instead of {before[-1]:,.6g}" if before else "")
        + (f"; {burst} steps are skipped." if burst else ".")
        + (ANOTHER if restored else ""),
        step=load.step,
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
