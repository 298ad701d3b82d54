"""A script that compiles is not accused of what only its eager code does.

A diagnosis judges the eager code that compiled code was made from. Compiled code may compute
otherwise: a fused chain of pointwise ops keeps its intermediate results in fp32. So the script runs
once more with torch.compile on (the control ``compiled``), watched from outside compiled code:

it trains       no fault; a note says what would fail in eager mode
it fails too    the finding stands
it did not run  nothing is decided

A finding about the script's own text (an order of calls, a state that is not restored) is the same
either way: it stands. So does one whose only symptom cannot be seen from outside compiled code.
Where a CPU rehearses CUDA, the compiled code of a GPU cannot be had: a script that trains compiled
on the CPU is then undecided.
"""

from __future__ import annotations

import dataclasses

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.precision_use import MIN_COMPARED
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.diagnose import Diagnosis, diagnose
from ampscope.observations import COMPILED_FRAMES, COMPILED_NOTE
from ampscope.verdicts.cure import follows

COMPILED = "compiled"  # the control
FAILS_TOO = "Ops were judged in eager mode; with torch.compile on the script fails too."
# Causes that lie in what ops computed, although their verdicts may name no single op.
_OF_NUMBERS = frozenset({"gradient_underflow", "loss_scale_too_high"})
# What a run that is watched from outside compiled code does not show.
_UNSEEN = frozenset(
    {Symptom.EVALUATION, Symptom.BUFFERS, Symptom.FROZEN, Symptom.CAUGHT, Symptom.DROPPED}
)


def wants_compiled(diagnosis: Diagnosis, evidence: Evidence) -> bool:
    """Whether the script has to run compiled before it is accused."""
    compiles = COMPILED_NOTE in evidence.as_is.outcome.notes
    return compiles and COMPILED not in evidence.runs and _is_of_ops(diagnosis)


def judged(evidence: Evidence) -> Diagnosis:
    """The rules' diagnosis, less what the compiled run acquits the script of."""
    diagnosis = diagnose(evidence)
    run = evidence.runs.get(COMPILED)
    if run is None or not _is_of_ops(diagnosis):
        return diagnosis
    why = _not_judged(run, evidence)
    if not why and _fails(run, evidence):
        return dataclasses.replace(diagnosis, notes=(FAILS_TOO,))
    if not why and evidence.policy == "rehearsal":
        why = "it trains when it is compiled for this CPU, and a GPU's cannot be rehearsed here"
    what = _what(diagnosis)
    if why:
        return dataclasses.replace(
            diagnosis,
            verdict="inconclusive",
            findings=(),
            undecided=f"Undetermined: in eager mode this is seen: {what} The script compiles its "
            f"code, and its compiled code was not judged: {why}.",
        )
    note = (
        f"The script would fail in eager mode: {what} Compiled, it trains: {len(run.attempts):,} "
        "optimizer steps ran with torch.compile on, without a bad one. Compiled code keeps the "
        "intermediate results of a fused chain of ops in fp32."
    )
    return dataclasses.replace(
        diagnosis, verdict="no_fault", findings=(), symptoms=(), notes=(note,)
    )


def _is_of_ops(diagnosis: Diagnosis) -> bool:
    """Whether all that speaks against the script is what its ops computed."""
    if not set(diagnosis.symptoms) - _UNSEEN:
        return False
    return all(f.verdict.op or f.cause in _OF_NUMBERS for f in diagnosis.findings)


def _what(diagnosis: Diagnosis) -> str:
    """What the eager run shows, as the rest of a sentence."""
    if diagnosis.findings:
        reason = diagnosis.findings[0].verdict.reason
        return reason if reason.endswith(".") else f"{reason}."
    return "; ".join(diagnosis.symptoms) + "."


def _not_judged(run: RunView, evidence: Evidence) -> str:
    """Why the compiled run says nothing; "" where it does."""
    outcome = run.outcome
    if run.has_exception and not evidence.as_is.has_exception:
        text = outcome.error_text.partition("\n")[0][:200].rstrip(" .")
        return f"it raised {outcome.error_type}" + (f": {text}" if text else "")
    if outcome.ended == "killed":
        return "it was stopped at a limit"
    frames = run.use(COMPILED_FRAMES)
    if frames is None or not frames.count:
        return "torch.compile compiled nothing here"
    if len(run.attempts) < min(MIN_COMPARED, len(evidence.as_is.attempts)):
        return "too few of its optimizer steps were seen"
    return ""


def _fails(run: RunView, evidence: Evidence) -> bool:
    """Whether a bad step is seen in the compiled run, or its loss leaves the fp32 control's."""
    if run.bad_loss_attempts or run.weights_broken or run.has_exception:
        return True
    if symptoms(run, evidence.fp32) - _UNSEEN:
        return True
    return follows(run, evidence.fp32) is False
