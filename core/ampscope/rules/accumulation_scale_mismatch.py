"""The scale changed, or gradients were unscaled, in the middle of an accumulation.

What it detects
    Between two zero_grad calls: a backward pass, then unscale_ or update, then another backward
    pass, then the step.

Why it matters
    Scaled and unscaled gradients are added up; the sum means nothing, and no error says so.

Blind spots
    Gradients that are cleared by setting them to None by hand.

Remedy
    unscale_, step and update only at the end of the window.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.scaled_gradients import Window, windows
from ampscope.observations import Call
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, not_applicable, passed


def check(evidence: Evidence) -> Verdict:
    """Found in the windows of the call log."""
    run = evidence.baseline
    if not run.has_scaler:
        return not_applicable("No loss was scaled.")
    wrong = [(w, call) for w in windows(run) for call in [_inside(w)] if call is not None]
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
                "windows with unscale_ or update inside", len(wrong), 0, "as_is", call.step
            ),
            Measurement(
                "backward passes in the window", len(window.backwards), 1, "as_is", call.step
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


def _inside(window: Window) -> Call | None:
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
    "accumulation_scale_mismatch",
    check,
    ("as_is",),
    32,
    explains=("gradient_underflow", "small_update_lost"),
)
