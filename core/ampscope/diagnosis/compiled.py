"""The diagnosis of a script's runs. One that compiles is not accused of what only its eager code
does; without a compiled run the answer is that of :mod:`ampscope.diagnosis.findings`.

A diagnosis judges the eager code that compiled code was made from. Compiled code may compute
otherwise: a fused chain of pointwise ops keeps its intermediate results in fp32. So the script
runs once more with torch.compile on (the control ``compiled``), watched from outside compiled
code:

    it trains       no fault; a note says what would fail in eager mode
    it fails too    the finding stands
    it did not run  nothing is decided

Where nothing is wrong in eager mode it runs compiled as well: numbers that leave the eager run's
are a finding of their own (:mod:`ampscope.analysis.compiled_runs`).

A finding about the script's own text (an order of calls, a state that is not restored) is the
same either way, as are data that are bad before any model sees them: it stands. So does one whose
only symptom cannot be seen from outside compiled code. Where a CPU rehearses CUDA, the compiled
code of a GPU cannot be had: a script that trains compiled on the CPU is then undecided.
"""

from __future__ import annotations

import dataclasses

from ampscope.analysis.compiled_runs import (
    EAGER_RANDOM,
    UNSEEN,
    apart,
    departure,
    repeating,
    unjudged,
)
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.healing import follows
from ampscope.analysis.precision_use import MIN_COMPARED
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import symptoms
from ampscope.control import COMPILED
from ampscope.diagnosis.captured_step import of_captured_step
from ampscope.diagnosis.findings import Diagnosis, diagnose
from ampscope.observations import COMPILED_NOTE

_NO_COMPILER = frozenset({"InvalidCxxCompiler", "CppCompileError"})
ALIKE = (
    "With torch.compile on, its first losses and gradient norms are as near to eager code's as "
    "half precision's own rounding explains ({:,} steps ran)."
)
OTHER_RANDOM = (
    "With torch.compile on it draws other random numbers (of dropout, for example); with those of "
    "eager code its first losses and gradient norms are eager code's, up to rounding."
)
UNKNOWN_LAYER = "The further runs do not tell which layer of the compiler does it."
FAILS_TOO = "Ops were judged in eager mode; with torch.compile on the script fails too."


def wants_compiled(diagnosis: Diagnosis, evidence: Evidence) -> bool:
    """Whether the script has to run compiled before it is accused, or acquitted. A GPU's compiled
    code cannot be had on a CPU: there a clean bill stays one of eager code."""
    if COMPILED_NOTE not in evidence.baseline.outcome.notes or COMPILED in evidence.runs:
        return False
    acquits = diagnosis.verdict == "no_fault" and evidence.policy != "rehearsal"
    return acquits or _is_of_ops(diagnosis)


def diagnosis_with_compiled_run(evidence: Evidence) -> Diagnosis:
    """The rules' diagnosis, less what the compiled run acquits the script of, and less what one
    captured step cannot decide."""
    diagnosis = of_captured_step(diagnose(evidence), evidence)
    run = evidence.runs.get(COMPILED)
    if run is None:
        return diagnosis
    why = unjudged(evidence.runs, COMPILED, MIN_COMPARED)
    if diagnosis.verdict == "no_fault":
        return _acquitted(diagnosis, evidence, why)
    if not _is_of_ops(diagnosis):
        return diagnosis
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
        f"The script would fail in eager mode: {what} Compiled, it trains: "
        f"{len(run.steps):,} "
        "optimizer steps ran with torch.compile on, without a bad one. Compiled code keeps the "
        "intermediate results of a fused chain of ops in fp32."
    )
    return dataclasses.replace(
        diagnosis, verdict="no_fault", findings=(), symptoms=(), notes=(note,)
    )


def _acquitted(diagnosis: Diagnosis, evidence: Evidence, why: str) -> Diagnosis:
    """A clean bill of the eager run, with what its compiled run says; ``why`` it says nothing."""
    run = evidence.runs[COMPILED]
    if run.outcome.error_type in _NO_COMPILER:
        why = "this machine has no C++ compiler that torch.compile could use"
    elif why and run.has_exception:
        text = f"Undetermined: in eager mode the script trains. With torch.compile on {why}."
        return dataclasses.replace(diagnosis, verdict="inconclusive", undecided=text)
    if why:
        return dataclasses.replace(diagnosis, notes=(f"Compiled code was not judged: {why}.",))
    found = departure(evidence.runs)
    if found is None:
        return dataclasses.replace(diagnosis, notes=(ALIKE.format(len(run.steps)),))
    drawn = evidence.runs.get(EAGER_RANDOM)
    is_drawn = drawn is not None and not apart(evidence.runs, EAGER_RANDOM)
    if is_drawn and not repeating(evidence.runs):
        return dataclasses.replace(diagnosis, notes=(OTHER_RANDOM,))
    text = f"Undetermined: eager code trains; compiled, {found.words}. {UNKNOWN_LAYER}"
    return dataclasses.replace(diagnosis, verdict="inconclusive", undecided=text)


def _is_of_ops(diagnosis: Diagnosis) -> bool:
    """Whether all that speaks against the script is what its ops computed."""
    if not set(diagnosis.symptoms) - UNSEEN:
        return False
    return all(f.verdict.op if f.rule.in_ops is None else f.rule.in_ops for f in diagnosis.findings)


def _what(diagnosis: Diagnosis) -> str:
    """What the eager run shows, as the rest of a sentence."""
    if diagnosis.findings:
        reason = diagnosis.findings[0].verdict.reason
        return reason if reason.endswith(".") else f"{reason}."
    return "; ".join(diagnosis.symptoms) + "."


def _fails(run: RunView, evidence: Evidence) -> bool:
    """Whether a bad step is seen in the compiled run, or its loss leaves the fp32 control's."""
    if run.bad_loss_steps or run.weights_broken or run.has_exception:
        return True
    if symptoms(run, evidence.fp32) - UNSEEN:
        return True
    return follows(run, evidence.fp32) is False
