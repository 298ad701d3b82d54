"""The scale changed, or gradients were unscaled, in the middle of an accumulation.

What it detects
    Between two zero_grad calls: a backward pass, then unscale_ or update, then another backward
    pass, then the step. Or gradients of a skipped step that were not cleared, to which every later
    backward pass adds, so that each later step is skipped as well.

Why it matters
    Scaled and unscaled gradients are added up; the sum means nothing, and no error says so.
    Infinity stays infinite whatever is added to it: the scale falls, and nothing is learned.

Blind spots
    What the script keeps in buffers of its own and adds to .grad itself.

Remedy
    unscale_, step and update only at the end of the window; zero_grad also after a skipped step.
"""

from __future__ import annotations

from ampscope.analysis.call_windows import CallWindow, windows
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scale_facts import hand_factor
from ampscope.control import BASELINE
from ampscope.observations import Call, OptimizerStep
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, not_applicable, passed


def check(evidence: Evidence) -> Verdict:
    """Found in the windows of the call log."""
    run = evidence.baseline
    if not run.has_scaler:
        return _kept_by_hand(evidence) or not_applicable("No loss was scaled.")
    wrong = [(w, call) for w in windows(run) for call in [_inside(w)] if call is not None]
    if not wrong and (kept := _kept_gradients(run)):
        return _never_cleared(evidence, kept)
    if not wrong:
        return passed("Every window was unscaled and updated at its end only.")
    window, call = wrong[0]
    name = "unscale_" if call.name == "unscale_" else "update"
    return Verdict(
        Status.FOUND,
        f"Line {call.line} calls scaler.{name} in the middle of an accumulation of "
        f"{len(window.backwards)} backward passes, in {len(wrong)} windows.",
        step=call.step,
        line=call.line,
        evidence=(
            Measurement(
                "windows with unscale_ or update inside", len(wrong), 0, BASELINE, call.step
            ),
            Measurement(
                "backward passes in the window", len(window.backwards), 1, BASELINE, call.step
            ),
        ),
        fix=Fix(
            "scaler_protocol",
            "Call unscale_, step and update at the end of the window only.",
            PATCH,
        ),
    )


PATCH = """for i, batch in enumerate(loader):
    scaler.scale(loss(batch) / accumulate).backward()
    if (i + 1) % accumulate == 0:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


MIN_KEPT = 3  # steps: one or two may be those of a search that goes on


def _kept_gradients(run: RunView) -> list[OptimizerStep]:
    """Steps that were skipped while the gradients of an earlier skipped step were still there, one
    optimizer's. The empty list where one of them was taken: they are cleared otherwise."""
    names = dict.fromkeys(a.optimizer for a in run.steps if a.kept_nonfinite)
    for name in names:
        kept = [a for a in run.steps if a.kept_nonfinite and a.optimizer == name]
        if len(kept) >= MIN_KEPT and all(a.skipped for a in kept):
            return kept
    return []


def _clearing(evidence: Evidence, optimizer: str) -> tuple[Call | None, bool]:
    """The zero_grad that should clear the gradients, and whether some run calls it before each
    step from the second on, as far as its calls are kept: then a condition keeps it from being
    called. Without such a run, any zero_grad for this optimizer: one before the loop, or once an
    epoch."""
    any_call: Call | None = None
    for run in evidence.runs.values():
        own = [c for c in run.calls if c.name == "zero_grad" and c.subject in (optimizer, "model")]
        any_call = any_call or next((c for c in own if c.line), None)
        cleared = {call.step: call for call in reversed(own)}
        last = max((call.step for call in run.calls), default=0)
        stepped = {a.step for a in run.steps if a.step <= last and a.optimizer == optimizer}
        if len(stepped) > 1 and cleared.keys() >= stepped - {min(stepped)}:
            return cleared[min(cleared)], True
    return any_call, False


def _never_cleared(evidence: Evidence, kept: list[OptimizerStep]) -> Verdict:
    run, first = evidence.baseline, kept[0]
    clearing, is_conditional = _clearing(evidence, first.optimizer)
    calls = [c for c in run.calls if c.name == "scaler_step" and not c.nested]
    line = next((c.line for c in calls if c.note == first.optimizer), "")
    there = f" at line {line}" if line else ""
    at = clearing.line if clearing is not None else ""
    named = f"the zero_grad{f' at line {at}' if at else ''} does not come"
    if clearing is None:
        named = f"no zero_grad of {first.optimizer} comes"
    elif is_conditional:
        named += " under all conditions"
    return Verdict(
        Status.FOUND,
        f"The gradients of a skipped step are not cleared: {named} between it and the next "
        f"scaler.step{there}, {len(kept)} times. What is not finite stays in .grad, so each of "
        "these steps is skipped as well, and the scale falls.",
        step=first.step,
        line=at or line,
        evidence=(
            Measurement("steps on gradients of a skipped one", len(kept), 0, BASELINE, first.step),
        ),
        fix=Fix(
            "scaler_protocol",
            "Call zero_grad after every step, also after one that the scaler skipped.",
            CLEARED,
            ("cleared_grads",),
        ),
    )


def _kept_by_hand(evidence: Evidence) -> Verdict | None:
    """Found where the script looks after overflows itself: it lowers a factor of its own and leaves
    the step out, and the next backward pass adds to what was not finite. From then on none of its
    batches leads to a step."""
    run, fp32 = evidence.baseline, evidence.fp32
    passes = [c for c in run.calls if c.name == "backward" and not c.nested]
    kept = {c.seq - 1 for c in run.calls if c.name == "kept"}
    factors = [hand_factor(c) for c in passes]
    refused = [
        after
        for after, was, now in zip(passes[1:], factors, factors[1:], strict=False)
        if after.seq in kept and was is not None and now is not None and now < was
    ]
    if len(refused) < MIN_KEPT or fp32 is None or not fp32.steps:
        return None
    if any(a.step >= refused[0].step for a in run.steps):
        return None  # one was taken: they are cleared otherwise
    clearing, _ = _clearing(evidence, fp32.steps[0].optimizer)
    at = clearing.line if clearing is not None else ""
    named = f"the zero_grad at line {at} is not reached" if at else "nothing clears them"
    return Verdict(
        Status.FOUND,
        f"The gradients of a step that the script left out are not cleared: {named} before the "
        f"next backward pass, {len(refused)} times. What is not finite stays in .grad, so each of "
        "these steps is left out as well, and the factor of the loss falls.",
        step=refused[0].step,
        line=at or refused[0].line,
        evidence=(
            Measurement(
                "backward passes on gradients of a step left out", len(refused), 0, BASELINE
            ),
        ),
        fix=Fix(
            "scaler_protocol",
            "Call zero_grad before every backward pass of a new batch.",
            "optimizer.zero_grad()  # also where the step was left out\n",
        ),
    )


CLEARED = """scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()  # under no condition
"""


def _inside(window: CallWindow) -> Call | None:
    """The first unscale_ or update between two backward passes of the window."""
    between: Call | None = None
    started = False
    for call in window.calls[:-1]:
        if call.name in ("scaler_step", "optimizer_step"):
            # Another optimizer has used up what was accumulated so far.
            started, between = False, None
        elif call.name == "backward":
            if between is not None:
                return between
            started = True
        elif (started and call.name == "unscale_" and call.note == window.optimizer) or (
            started and call.name == "update"
        ):
            between = between or call
    return None


RULE = Rule(
    code="AMP018",
    id="accumulation_scale_mismatch",
    title="The scale changed while gradients accumulated",
    definition="unscale_ or update was called inside an accumulation window.",
    check=check,
    needs=(BASELINE,),
    order=32,
    explains=(
        "gradient_underflow",
        "small_update_lost",
        "loss_scale_too_high",
        "loss_magnitude_overflow",
    ),
)
