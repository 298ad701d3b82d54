"""How a training stands, in one sentence."""

from __future__ import annotations

import math

from ampscope.analysis.training import Training
from ampscope.records import State
from ampscope.report.words.numbers import number, plural

ALARM_NAMES = {
    "nonfinite_loss": "loss not finite",
    "nonfinite_gradient": "gradient not finite",
    "nonfinite_weight": "weight not finite",
    "zero_gradients": "gradients all zero",
    "loss_spike": "loss jumped",
    "stalled_weights": "weights stalled",
    "scale_collapse": "loss scale collapsed",
    "skips_in_a_row": "skips in a row",
    "lost_share": "gradients lost",
    "weights_not_moving": "weights do not move",
}
_HEALTHY = {
    State.QUEUED: "Healthy so far",
    State.RUNNING: "Healthy so far",
    State.FINISHED: "Healthy to the end",
    State.CANCELLED: "Healthy until it was cancelled",
    State.FAILED: "Finite until it failed",
    State.LOST: "Finite until it was lost",
}
_ALARMED = {State.QUEUED: "Finite so far", State.RUNNING: "Finite so far"}


def answer(training: Training) -> str:
    """Whether one run is well, and how far it is."""
    if training.bad_since is not None:
        return f"Bad since step {training.bad_since:,}: {_what_is_bad(training)}."
    alarms = training.of("alarm")
    state = training.run.state
    start = _HEALTHY[state]
    if training.of("nonfinite"):
        start = _recovered(training)
    elif alarms:
        newest = alarms[-1]
        name = ALARM_NAMES.get(newest.name, newest.name)
        start = _ALARMED.get(state, _HEALTHY[state].replace("Healthy", "Finite"))
        start += f", with {plural(len(alarms), 'alarm')} (the last at step {newest.step:,}: {name})"
    return f"{start}: {progress(training)}."


def _recovered(training: Training) -> str:
    """``Went bad at step 30 and recovered``"""
    steps = sorted({event.step for event in training.of("nonfinite")})
    times = f"{len(steps)} times, the last one " if len(steps) > 1 else ""
    start = f"Went bad {times}at step {steps[-1]:,}"
    gone = {State.FAILED: "failed later", State.LOST: "was lost later"}.get(training.run.state)
    return f"{start}, recovered, and {gone}" if gone else f"{start} and recovered"


def progress(training: Training) -> str:
    """``step 4,210, loss 2.31, 3 skips in all, last at step 12``"""
    last = training.last
    if last is None:
        return "no step has come yet"
    parts = [f"step {last.step:,}"]
    parts += [f"loss {number(last.loss)}"] if last.loss is not None else []
    skipped, bad_losses = training.totals.skipped, training.totals.nonfinite_losses
    if skipped:
        parts += [f"{plural(skipped, 'skip')} in all"]
        parts += [f"last at step {training.last_skip:,}"] if training.last_skip is not None else []
    elif last.scale is not None:
        parts.append("no skip")
    if bad_losses:
        parts.append(f"the loss was not finite at {plural(bad_losses, 'step')}")
    return ", ".join(parts)


def _what_is_bad(training: Training) -> str:
    since = training.bad_since
    shown = [s for s in training.steps if since is not None and s.step >= since]
    loss = next((s.loss for s in shown if s.loss is not None and not math.isfinite(s.loss)), None)
    if loss is not None:
        text = f"the loss was {number(loss)}"
    elif all(s.skipped for s in shown):
        text = "GradScaler leaves out every step"
    else:
        text = "gradients were not finite and the optimizer ran all the same"
    steps = {e.step for e in training.of("capsule") if since is not None and e.step >= since}
    if not steps:
        return text
    which = "that step" if min(steps) == since else f"step {min(steps):,}"
    return f"{text}; the capsule of {which} tells where it came from"
