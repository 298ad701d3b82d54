"""What one captured step of a training can decide, and what it cannot.

``ampscope diagnose --capsule`` runs the step that a capsule holds as a script of one step
(:mod:`ampscope.watcher.captured_step`). The rules judge it as any script. But a step has no
history: weights that are not finite "before training" were broken by an earlier step, and a loss
that is not finite in fp32 either says nothing of how the weights came there. Such findings become
"undetermined", with what was seen; a finding stands that names the op of the step to blame, or the
batch.
"""

from __future__ import annotations

import dataclasses
import math

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.lead import lead
from ampscope.analysis.run_view import RunView
from ampscope.control import SCALE_1
from ampscope.diagnosis.findings import Diagnosis, Finding
from ampscope.diagnosis.result import clue
from ampscope.observations import CAPTURED_FORWARD, CAPTURED_NOTE, CAPTURED_STEP

LIMITS = (
    "Judged from one captured step (step 0 is step {:,.0f} of the training): fixes were tried on "
    "this step alone. Whether the training then learns, and faults that need several steps (a "
    "learning rate, an optimizer's state, the scaler's calls, updates that are lost, the loss "
    "function), it cannot tell."
)
AGREES = 0.1  # the fixed step's loss and its gradients' norm, relative to the fp32 control's
_OUTSIDE = {
    "loss": "the loss function, which is not part of it, made the loss that was not finite.",
    "output gradient": "the gradient that the loss function gave to its output was not finite.",
    "backward": "its gradients were not finite after backward. Look at what changes .grad before "
    "the optimizer steps, and at parameters that are used outside the model.",
}


def is_captured(run: RunView) -> bool:
    """Whether the script was one captured step."""
    return run.use(CAPTURED_STEP) is not None


def of_captured_step(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """``diagnosis`` less what one step cannot decide; unchanged of any other script."""
    run = evidence.baseline
    captured = run.use(CAPTURED_STEP)
    if captured is None:
        return diagnosis
    told = LIMITS.format(captured.value or 0)
    notes = (*diagnosis.notes, told, *(u.op for u in run.uses if u.name == CAPTURED_NOTE))
    kept = tuple(f for f in diagnosis.findings if _is_of_the_step(f))
    if kept and diagnosis.verdict == "fault":
        return dataclasses.replace(diagnosis, findings=kept, latent=(), notes=notes)
    return dataclasses.replace(
        diagnosis,
        verdict="inconclusive",
        findings=(),
        latent=(),
        notes=notes,
        undecided=f"Undetermined: {_undecided(evidence)}",
    )


def cures_the_step(fixed: RunView, fp32: RunView | None) -> bool | None:
    """Whether the step with a fix gives what the fp32 control gives: the loss, and the norm of the
    gradients where the kept ones were finite. None where the control is not finite."""
    if fp32 is None or not fp32.steps:
        return None
    count = 1 if fixed.use(CAPTURED_FORWARD) is not None else 2
    own, reference = _results(fixed)[:count], _results(fp32)[:count]
    if not all(map(math.isfinite, reference)):
        return None
    pairs = zip(own, reference, strict=True)
    return all(math.isfinite(a) and abs(a - b) <= AGREES * abs(b) for a, b in pairs)


def _results(run: RunView) -> tuple[float, ...]:
    """Loss and gradient norm of the step; NaN where one was not recorded."""
    if not run.steps:
        return math.nan, math.nan
    loss, norm = sum(run.losses) if run.losses else None, run.steps[-1].grad_norm
    return tuple(math.nan if value is None else value for value in (loss, norm))


def _is_of_the_step(finding: Finding) -> bool:
    in_one_step = finding.rule.in_one_step
    return bool(finding.verdict.op) if in_one_step is None else in_one_step


def _undecided(evidence: Evidence) -> str:
    """What was seen in the step, where no finding of it stands."""
    run, fp32 = evidence.baseline, evidence.fp32
    broken = [s.name for s in run.scans_of("start", "parameter") if s.nan + s.inf]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        return (
            f"{broken[0]}{more} held NaN or infinity before this step. An earlier step broke it; "
            "the first capsule of the run, or one of an earlier step, shows how."
        )
    if fp32 is not None and fp32.first_bad_step is not None:
        root = evidence.root
        where = f" First bad op: {root.op.op} in {root.op.module or 'the model'}." if root else ""
        return (
            "with these weights and this batch the step is not finite in fp32 either."
            f"{where} Whether half precision brought the weights there, one step cannot tell."
        )
    if run.first_bad_step is not None:
        frozen = evidence.runs.get(SCALE_1)
        if frozen is not None and frozen.first_bad_step is None:
            return (
                f"gradients overflow at the loss scale of this step, {_scale(run):,.6g}, and are "
                "finite at 1. Whether the scaler would have come down to a scale that fits, one "
                "step cannot tell."
            )
        text = "the step is not finite, and no rule has enough evidence to name the cause."
        return f"{text} {clue(lead(run, fp32))}"
    use = run.use(CAPTURED_STEP)
    sign = _OUTSIDE.get(use.op if use else "", "what was not finite is not part of the capsule.")
    return f"the model is finite throughout, forward and backward: {sign}"


def _scale(run: RunView) -> float:
    use = run.use(CAPTURED_STEP)
    return 1.0 if use is None or use.other is None else use.other
