"""Sentences of the Diagnosis page: the verdict, and what to do next.

Undetermined is said as such, and so is that AMP is innocent. Nothing here is Markdown: the page
escapes it all.
"""

from __future__ import annotations

from ampscope.analysis.precision_use import PrecisionUse
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom
from ampscope.causes import CAUSES
from ampscope.diagnose import Finding
from ampscope.records import State
from ampscope.report import fix_words
from ampscope.report.words import precision
from ampscope.report.words.controls import control
from ampscope.report.words.numbers import plural
from ampscope.rules.verdict import Status
from ampscope.verdicts.report import OUT_OF_MEMORY, Report, clue

_AGAIN = {
    State.CANCELLED: "Nothing is known yet. Diagnose the script again when you like:",
    State.LOST: "Diagnose the script again; with fewer data or a smaller batch if memory ran out:",
}
INNOCENT = "AMP is innocent"  # as the rules say it when the fp32 control fails at the same place


def verdict(report: Report, as_is: RunView) -> str:
    """The page's answer."""
    problem = could_not_run(report, as_is)
    if problem:
        return f"Could not diagnose: {problem}"
    diagnosis = report.diagnosis
    if diagnosis.findings:
        finding = diagnosis.findings[0]
        innocent = f"{INNOCENT}. " if INNOCENT in finding.verdict.reason else ""
        return f"{innocent}Root cause: {CAUSES[finding.cause].title}{_where(finding)}."
    if diagnosis.verdict == "inconclusive":
        return f"Undetermined: {'; '.join(diagnosis.symptoms)}."
    if "fp32" not in report.control_symptoms:
        return "No fault seen in the script as it is; the fp32 control has not been run."
    # The headline itself, where it says that there was no AMP to judge.
    none = report.precision is not None and report.precision.no_half
    return f"{'This run used no half precision. ' if none else ''}{no_fault(report)}"


def no_fault(report: Report) -> str:
    """The verdict where no fault was found: of which precision and of how many steps it is."""
    use = report.precision
    if report.scope:
        return report.scope
    return "No fault found." if use is None else precision.no_fault(use)


def in_fp32(report: Report) -> str:
    """A key figure's word for the fp32 control."""
    fp32 = report.control_symptoms.get("fp32")
    if fp32 is None:
        return "not run"
    if OUT_OF_MEMORY in fp32:
        return "out of memory"
    return "fails too" if fp32 else "healthy"


def headline(report: Report) -> str:
    """What ran in which precision, and how much was judged; "" where nothing was."""
    return "" if report.precision is None else precision.headline(report.precision)


def paragraph(report: Report, as_is: RunView) -> str:
    """What a person should know beside the verdict."""
    diagnosis = report.diagnosis
    if could_not_run(report, as_is):
        return "What was recorded up to then is kept and shown below."
    if diagnosis.findings:
        return diagnosis.findings[0].verdict.reason
    if diagnosis.verdict == "inconclusive":
        fp32 = report.control_symptoms.get("fp32")
        control = f" The fp32 control fails too: {'; '.join(fp32)}." if fp32 else ""
        if fp32 and OUT_OF_MEMORY in fp32:
            control = f" The fp32 control: {'; '.join(fp32)}."
        return (
            f"{clue(report.lead)} No rule has enough evidence to name the cause.{control}"
            f"{_missing(report)}"
        )
    if "fp32" not in report.control_symptoms:
        return "Without it nobody can tell whether the script learns as well as it would in fp32."
    return _harmless(as_is)


def next_step(report: Report, as_is: RunView) -> str:
    """What to do now."""
    diagnosis = report.diagnosis
    first = report.runs.get("as_is")
    state = first.state if first is not None else State.FINISHED
    if first is None:
        return "Diagnose the script:"
    if could_not_run(report, as_is):
        return _AGAIN.get(state, "Mend what the sentence names, then diagnose the script again:")
    if not diagnosis.findings:
        if diagnosis.verdict == "inconclusive":
            return when_undetermined(report)
        if "fp32" not in report.control_symptoms:
            return "Diagnose it again, with its fp32 control:"
        use = report.precision
        if use is not None and use.no_half:
            return _towards_half(use)
        if report.scope:
            return "Nothing so far. To see whether it stays so, diagnose it over more steps:"
        if use is not None and use.too_few:
            return "Diagnose it again over more steps, so that the evidence grows:"
        if use is not None and use.not_judged:
            return "Nothing, as far as it was judged: mixed precision needs no change there."
        return "Nothing: mixed precision needs no change here."
    cured = fix_words.best(report)
    advice = fix_words.sentence(diagnosis.findings[0], cured)
    if cured is not None:
        return f"{advice} A run with this fix was seen to work; the patch is below."
    if (removed := fix_words.chosen(report)) is not None:
        advice = fix_words.sentence(diagnosis.findings[0], removed)
        return f"{advice} {fix_words.seen(report)}"
    return f"{advice} No run with a fix was seen to work." if report.trials else advice


def when_undetermined(report: Report) -> str:
    """Advice that fits how the script ended and what is known of the fault."""
    fp32 = report.control_symptoms.get("fp32", ())
    if OUT_OF_MEMORY in fp32:
        return "The fp32 control ran out of memory: use a smaller batch, then diagnose it again:"
    if fp32:
        return (
            "The fp32 control fails too, so the cause is no half precision: look at the data, the "
            "learning rate and the place that is named above."
        )
    if any(note.startswith("The script does not reproduce") for note in report.notes):
        return "Seed every generator that the script uses, then diagnose it again:"
    if report.was_stopped:
        return "The script was stopped before its end. Diagnose it again over more steps:"
    found = report.lead
    if Symptom.EXCEPTION in report.diagnosis.symptoms and found is not None:
        at = f" at {found.line}" if found.line else ""
        return f"Fix the script's own error{at} first; the fp32 control does not raise it."
    if found is not None and found.module and found.op:
        return (
            f"Print the largest magnitude of what goes into {found.module}"
            f"{f' at {found.line}' if found.line else ''}; `ampscope run --fix "
            f"fp32_modules:{found.module}` shows whether that module in fp32 cures it."
        )
    if found is not None and found.line:
        return (
            f"Print the largest magnitudes at {found.line}; `ampscope run --fix "
            f"fp32_lines:{found.line}` shows whether that line in fp32 cures it."
        )
    if report.control_symptoms.get("bf16") == ():
        return "It trains in bf16, so the range of fp16 is the likely trouble: use bf16."
    return "Compare the losses on the Diagnosis page: the script trains in fp32, and not as it is."


def options(report: Report, as_is: RunView) -> str:
    """Options of the command that :func:`next_step` announces."""
    use = report.precision
    if could_not_run(report, as_is) or use is None:
        return ""
    if use.no_half and report.diagnosis.verdict == "no_fault":
        return " --policy cuda" if precision.rehearsal_helps(use) else ""
    return " --steps 1000"


def _towards_half(use: PrecisionUse) -> str:
    """How the next diagnosis judges AMP."""
    kinds = {reason.kind for reason in use.reasons}
    if "trainer_fp16" in kinds:
        return "Run it on a GPU, or ask the trainer for bf16, which it has on a CPU too."
    if precision.rehearsal_helps(use):
        return "Run it on a GPU, or rehearse CUDA's rules on this CPU:"
    if "cuda_asked" in kinds:
        return "Run it on a GPU, or let it use torch.autocast('cpu') here; then diagnose it again:"
    return "Switch AMP on, then diagnose the script again:"


def could_not_run(report: Report, as_is: RunView) -> str:
    """Why there is nothing to judge, or an empty text."""
    if "as_is" not in report.runs:
        run = control(as_is.control)
        return f"only a run {run} was recorded, and none of the script as it is."
    return report.could_not_run


def _missing(report: Report) -> str:
    """What the rules say that they would have needed."""
    open_ = [v.reason for _, v in report.diagnosis.answers if v.status is Status.INCONCLUSIVE]
    return f" What is missing: {' '.join(dict.fromkeys(open_))}" if open_ else ""


def _harmless(as_is: RunView) -> str:
    """Things that look like faults and are none."""
    skips = len(as_is.skips)
    if not skips:
        return f"{plural(len(as_is.attempts), 'optimizer step')} were seen."
    total = plural(len(as_is.attempts), "optimizer step")
    if as_is.leading_skips == skips:
        return (
            f"GradScaler left out the first {skips} of {total} while it searched for a loss scale. "
            "That is how it works, and no fault."
        )
    return f"GradScaler left out {skips} of {total}, no more than its search for a scale explains."


def _where(finding: Finding) -> str:
    found = finding.verdict
    place = f", in {found.module}" if found.module else f", at {found.line}" if found.line else ""
    return place + (f", first at step {found.step}" if found.step is not None else "")
