"""Training went on with a fresh scaler.

What it detects
    A checkpoint that is loaded, a scaler that was created and whose load_state_dict is never
    called (or that of another scaler is), and a scale that jumps back to its initial value, with a
    burst of skips. A line that makes a scaler again and again for an optimizer that trains already,
    as one inside the function of an epoch does, where the searches after the first one skip more
    than a quarter of the steps.

Why it matters
    The scale that training had found is lost; the steps after the resume are skipped or
    unstable.

Blind spots
    A resume in which the fresh scale happens to fit; new scalers of which each finds its scale
    soon; a checkpoint of an earlier process that holds no scaler state, which looks like pretrained
    weights.

Remedy
    Save scaler.state_dict() with the checkpoint, and load it. Make one scaler, outside the loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE
from ampscope.observations import Call, OptimizerStep
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
    found = _made_anew(run)
    if found is not None:
        return found
    if not run.has_scaler or not any(c.name == "load" and not c.nested for c in run.calls):
        return not_applicable("Nothing was resumed under a scaler.")
    answers = [_judged(run, resume) for resume in _resumes(run)]
    if not answers:
        return passed("Nothing was trained with a scaler after the load.")
    return next((a for a in answers if a.status is Status.FOUND), answers[-1])


SEARCHED = 0.25  # of the steps from the second scaler on


def _made_anew(run: RunView) -> Verdict | None:
    """One line made each scaler that took an optimizer over from another, at a scale far above
    the last one, and more than :data:`SEARCHED` of the steps since were skipped in searches."""
    made = {c.subject: c for c in run.calls if c.name == "scaler_new"}
    jumps: list[tuple[OptimizerStep, float]] = []  # first step with a new scaler; scale over last
    burst = 0
    for name in {a.optimizer for a in run.steps}:
        own = [a for a in run.steps if a.optimizer == name and a.scaler]
        searches = False
        for last, step in pairwise(own):
            if last.scaler != step.scaler:
                before, now = made.get(last.scaler), made.get(step.scaler)
                again = (
                    before is not None
                    and now is not None
                    and now.line == before.line
                    and now.step > last.step  # not one of several that take turns
                    and step.scale >= JUMP * last.scale
                )
                searches = again and step.skipped
                if again:
                    jumps.append((step, step.scale / last.scale))
            searches = searches and step.skipped
            burst += searches
    if not jumps:
        return None
    first, jump = min(jumps, key=lambda pair: pair[0].step)
    since = sum(a.step >= first.step for a in run.steps)
    if burst <= SEARCHED * since:
        return None
    line = made[first.scaler].line
    return Verdict(
        Status.FOUND,
        f"Line {line} makes a new scaler {len(jumps) + 1} times while one optimizer trains, and the"
        f" scale jumps back to {first.scale:,.6g} each time; {burst} steps are skipped in the"
        " searches that follow.",
        step=first.step,
        line=line,
        evidence=(
            Measurement(
                "skips right after a new scaler", burst, int(SEARCHED * since), BASELINE, first.step
            ),
            Measurement("steps since the second scaler", since, None, BASELINE, first.step),
            Measurement("new scale over the last one", jump, JUMP, BASELINE, first.step),
        ),
        fix=Fix(
            "change_scale",
            "Make one scaler before the training, and hand it to every epoch.",
            ONE_SCALER,
        ),
    )


ONE_SCALER = """scaler = torch.amp.GradScaler(device)  # once, beside the optimizer
for epoch in range(epochs):
    train_one_epoch(model, loader, optimizer, scaler)
"""


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
    """Of one resume: whether the scaler went on from where it was."""
    load, later = resume.load, resume.later
    restored = {c.subject for c in later if c.name == "scaler_load_state_dict"}
    if restored & {c.subject for c in later if c.name == "scale"}:
        return passed("The scaler's state was restored.")
    before = [a.scale for a in run.steps if a.scaler and a.step < load.step]
    after = [a for a in run.steps if a.scaler and load.step <= a.step < resume.until]
    if not after:
        return passed("No step followed the load.")
    burst = sum(1 for _ in takewhile(lambda a: a.skipped, after))
    jump = after[0].scale / before[-1] if before and before[-1] else None
    jumped = jump is not None and jump >= JUMP
    had_state = load.note == STATE
    if not before and not had_state and burst:
        # Pretrained weights come without a scaler, and a new scaler searches for its scale.
        return inconclusive("Nothing was trained before the load: it may be no resume.")
    if not jumped and (before or not (had_state and burst)):
        return passed("The scale did not jump at the load.")
    reason = (
        f"Line {load.line} resumes training, and the scaler starts anew at {after[0].scale:,.6g}"
        + (f" instead of {before[-1]:,.6g}" if before else "")
        + (f"; {burst} steps are skipped." if burst else ".")
    )
    return _starts_anew(load, reason + (ANOTHER if restored else ""), burst, jump)


def _starts_anew(load: Call, reason: str, burst: int, jump: float | None) -> Verdict:
    values = [
        Measurement("skips right after the load", burst, 0, BASELINE, load.step),
        Measurement("checkpoint", load.note, STATE, BASELINE, load.step),
    ]
    if jump is not None:
        name = "scale after the load over scale before"
        values.append(Measurement(name, jump, JUMP, BASELINE, load.step))
    text = "Save the scaler's state with the checkpoint, and load it."
    fix = Fix("save_scaler_state", text, PATCH)
    return Verdict(
        Status.FOUND, reason, step=load.step, line=load.line, evidence=tuple(values), fix=fix
    )


ANOTHER = " The saved state was loaded into another scaler, which scales nothing after that."
PATCH = """torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, path)
scaler.load_state_dict(checkpoint["scaler"])
"""


RULE = Rule(
    code="AMP021",
    id="scaler_state_lost",
    title="The scaler's state was not restored",
    definition="Training resumed with a fresh scaler, and the scale jumped back to its initial "
    "value.",
    check=check,
    needs=(BASELINE,),
    order=33,
    explains=("loss_scale_too_high", "loss_magnitude_overflow"),
)
