"""Sentences of the Diagnosis page: the verdict, and what to do next.

They also say when the cause is undetermined and when AMP is not at fault. Nothing here is
Markdown: the page escapes every sentence.

:func:`causal_chain` leads from the root cause to what a user sees; :func:`headline` says what ran
in which precision, and how many steps were judged.
"""

from __future__ import annotations

import math

from ampscope import extensions
from ampscope.analysis.precision_use import PrecisionUse
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom
from ampscope.causes import CAUSES
from ampscope.control import BASELINE, Control
from ampscope.diagnosis.findings import Finding
from ampscope.diagnosis.result import (
    KEPT_APART,
    OUT_OF_MEMORY,
    SEARCH_NOTE,
    DiagnosisResult,
    gpu_that_emulates_bf16,
)
from ampscope.number_words import percent, plural, share, value
from ampscope.numerics.formats import FORMATS
from ampscope.observations import BadOp, Operand, OptimizerStep
from ampscope.records import State
from ampscope.rules.verdict import Status
from ampscope.story import fix_words
from ampscope.story.document import ChainLink, Figure

_AGAIN = {
    State.CANCELLED: "Nothing is known yet. Diagnose the script again when you like:",
    State.LOST: "Diagnose the script again; with fewer data or a smaller batch if memory ran out:",
}
INNOCENT = "AMP is innocent"  # as the rules say it when the fp32 control fails at the same place


def verdict(report: DiagnosisResult, baseline: RunView) -> str:
    """The page's answer."""
    problem = could_not_run(report, baseline)
    if problem:
        return f"Could not diagnose: {problem}"
    diagnosis = report.diagnosis
    if diagnosis.findings:
        finding = diagnosis.findings[0]
        innocent = f"{INNOCENT}. " if INNOCENT in finding.verdict.reason else ""
        return f"{innocent}{heading(finding)}{_where(finding)}."
    if diagnosis.verdict == "inconclusive":
        return _undetermined(report)
    if "fp32" not in report.control_symptoms:
        return "No fault seen in the baseline run; the fp32 control has not been run."
    # The headline itself, where it says that there was no AMP to judge.
    none = report.precision is not None and report.precision.no_half
    return f"{'This run used no half precision. ' if none else ''}{no_fault(report)}"


def heading(finding: Finding, rank: str = "Root cause") -> str:
    """What a finding is called on every surface. ``rank`` is "Also found" behind the first, and
    "Latent" for a loss of numbers that has done no harm so far."""
    return f"{rank}: {CAUSES[finding.cause].titled}"


def _where(finding: Finding) -> str:
    found = finding.verdict
    place = f", in {found.module}" if found.module else f", at {found.line}" if found.line else ""
    return place + (f", first at step {found.step}" if found.step is not None else "")


def _undetermined(report: DiagnosisResult) -> str:
    return f"Undetermined: {'; '.join(report.symptom_words)}."


def no_fault(report: DiagnosisResult) -> str:
    """The verdict where no fault was found: of which precision and of how many steps it is."""
    use = report.precision
    said = report.scope or ("No fault found." if use is None else precision_no_fault(use))
    if use is not None and (why := _uncompared(report)):
        said = f"No fault found in {plural(use.steps, 'optimizer step')}. {why}"
    latent = (CAUSES[f.cause] for f in report.diagnosis.latent)
    titles = "; ".join(cause.inside for cause in latent)
    return f"{said} Latent, without harm so far: {titles}." if titles else said


def _uncompared(report: DiagnosisResult) -> str:
    """Why the baseline run is compared with nothing, where its fp32 control raised; "" elsewhere.
    What an assertion says holds in the baseline run."""
    use = report.precision
    raised = Symptom.EXCEPTION in report.control_symptoms.get("fp32", ())
    if not raised or use is None or use.no_half or not use.too_few:
        return ""
    run = report.runs.get("fp32")
    said = fix_words.symptoms_seen(report, "fp32")
    text = f"There is no fp32 control to compare them with: in fp32 {said}."
    halves = [dtype for dtype, _ in use.flops if dtype in ("fp16", "bf16")]
    if run is not None and "AssertionError" in run.message and halves:
        text += f" The same assertion holds in {halves[0]}."
    return text


def _raised_alone(report: DiagnosisResult) -> bool:
    """The fp32 control ended by an error that the baseline run did not meet: it shows no failure of
    the training in fp32."""
    seen = report.control_symptoms.get("fp32", ())
    return {*seen} == {Symptom.EXCEPTION} and Symptom.EXCEPTION not in report.diagnosis.symptoms


def could_not_run(report: DiagnosisResult, baseline: RunView) -> str:
    """Why there is nothing to judge, or an empty text."""
    if BASELINE not in report.runs:
        run = Control(baseline.control).words
        return f"only a run {run} was recorded, and no baseline run."
    return report.could_not_run


_FIX_STATES = {
    "verified": "A run with the fix did not show the symptom, and its loss follows fp32's",
    "none worked": "Each run with a fix still showed the symptom, or the cause",
    "not measurable": "The pattern is removed; the script showed no symptom to compare",
    "inconclusive": "The pattern is removed; too few steps were run to tell whether the loss falls",
    "not tried": "No run with a fix has been made",
}


def key_figures(report: DiagnosisResult) -> list[Figure]:
    """Of the first finding: where, since when, the fix, and what fp32 did."""
    found = report.diagnosis.findings[0].verdict
    place = found.module or found.line or "the whole script"
    at = ", ".join(filter(None, (found.module, found.line))) or place
    step = "no step" if found.step is None else f"step {found.step:,}"
    fix = fix_words.state(report)
    fp32 = fix_words.symptoms_seen(report, "fp32")
    return [
        Figure("Where", place, f"{at}; {found.op or 'no single op'}"),
        Figure("First seen at", step, "Optimizer steps, skipped ones included, count from 0"),
        Figure("Fix", fix, _FIX_STATES[fix]),
        Figure(
            "In fp32",
            in_fp32(report),
            fp32 or "The same script with autocast and the scaler off",
        ),
    ]


def in_fp32(report: DiagnosisResult) -> str:
    """A key figure's word for the fp32 control."""
    fp32 = report.control_symptoms.get("fp32")
    if fp32 is None:
        return "not run"
    if OUT_OF_MEMORY in fp32:
        return "out of memory"
    if _raised_alone(report):
        return "raised"
    return "fails too" if fp32 else "healthy"


def headline(report: DiagnosisResult) -> str:
    """What ran in which precision, and how much was judged; "" where nothing was."""
    return "" if report.precision is None else precision_headline(report.precision)


MAX_REASONS = 3
_FLOPS = "FLOPs (matmuls and convolutions, forward and backward)"
_REASONS = {
    "cuda_missing": "{what} on CUDA{at} is off, because this machine has no CUDA device",
    "trainer_fp16": (
        "the trainer was asked for {what}, which Accelerate leaves out on a CPU without an error"
    ),
    "autocast_off": "autocast{at} is disabled",
    "autocast_idle": "no op ran in half precision under autocast{at}",
    "scaler_off": "the GradScaler{at} is disabled",
    "cuda_asked": "torch.cuda.{what}(){at} finds no device on this machine",
    "nullcontext": "nullcontext is entered{at}",
}


def precision_headline(use: PrecisionUse) -> str:
    """Which precision ran, and how many steps were judged; "" where no step was made."""
    if not use.steps:
        return ""
    judged = f"{plural(use.steps, 'optimizer step')} {'was' if use.steps == 1 else 'were'} judged"
    if not use.is_recorded:
        return f"{judged}; in which precision each op ran was not recorded."
    if use.no_half:
        return f"This run used no half precision: {why_none(use)}. {judged}, in fp32."
    if use.computed_none:
        places = plural(len(use.sites), "line")
        shown = ", ".join(use.sites[:MAX_REASONS])
        return (
            "No op computed in half precision, but numbers became half at "
            f"{places} ({shown}{', …' if len(use.sites) > MAX_REASONS else ''}); {judged}."
        )
    shares = _shares(use)
    return f"{shares[:1].upper()}{shares[1:]}; {judged}."


def _shares(use: PrecisionUse) -> str:
    half = plural(use.half_ops, "other op")
    if use.half_share is None:
        return f"No matmul and no convolution ran; {half} computed in half precision"
    (first, most), *rest = use.flops
    if not rest:
        text = f"All {_FLOPS} ran in {first}"
    else:
        text = f"{percent(most / use.total)} of the {_FLOPS} ran in {first}"
        text += "".join(f", {percent(flops / use.total)} in {dtype}" for dtype, flops in rest)
    return text if use.half_share else f"{text}; {half} computed in half precision"


def why_none(use: PrecisionUse) -> str:
    """Why nothing ran in half precision, without a full stop."""
    if not use.reasons:
        return "it opens no autocast region and has no half-precision weights or inputs"
    shown = ((r.kind, r.what, f" at {r.line}" if r.line else "") for r in use.reasons[:MAX_REASONS])
    return "; ".join(_REASONS[kind].format(what=what, at=at) for kind, what, at in shown)


def precision_no_fault(use: PrecisionUse) -> str:
    """The verdict where no fault was found: what was compared, and what was not."""
    if use.no_half:
        return "No fault found in fp32; what AMP does to this training was not judged."
    if use.too_few:
        return (
            f"No fault found in {plural(use.steps, 'optimizer step')}. That is too few to "
            "compare the training with its fp32 control."
        )
    return f"No fault found: the script trains as its fp32 control does{use.apart}."


def rehearsal_helps(use: PrecisionUse) -> bool:
    """Whether ``--policy cuda`` would bring in the half precision that CUDA's absence kept out."""
    missed = use.no_half and any(r.kind == "cuda_missing" for r in use.reasons)
    return missed and bool(extensions.simulated_device())


def paragraph(report: DiagnosisResult, baseline: RunView) -> str:
    """What a person should know beside the verdict."""
    diagnosis = report.diagnosis
    if could_not_run(report, baseline):
        return "What was recorded up to then is kept and shown below."
    if diagnosis.findings:
        return diagnosis.findings[0].verdict.reason
    if diagnosis.verdict == "inconclusive":
        return report.undecided.removeprefix(_undetermined(report)).strip() + missing(report)
    if "fp32" not in report.control_symptoms:
        return "Without it, it is unknown whether the script learns as well as in fp32."
    return _harmless(report, baseline)


def missing(report: DiagnosisResult) -> str:
    """What follows the reason of an undetermined verdict: that fp32 fails too, and what the rules
    say that they would have needed."""
    fp32 = report.control_symptoms.get("fp32", ())
    too = "" if OUT_OF_MEMORY in fp32 or _raised_alone(report) else " fails too"
    control = f" The fp32 control{too}: {fix_words.symptoms_seen(report, 'fp32')}." if fp32 else ""
    open_ = [v.reason for _, v in report.diagnosis.answers if v.status is Status.INCONCLUSIVE]
    needed = f" What is missing: {' '.join(dict.fromkeys(open_))}" if open_ else ""
    return control + needed


def other_notes(report: DiagnosisResult, said: str) -> str:
    """The notes that the paragraph ``said`` has not shown."""
    return " ".join(note for note in report.notes if note != said)


def _harmless(report: DiagnosisResult, baseline: RunView) -> str:
    """Things that look like faults and are none."""
    skips = len(baseline.skips)
    if not skips:
        return "No optimizer step was skipped."
    total = plural(len(baseline.steps), "optimizer step")
    if baseline.leading_skips == skips:
        if note := _search_note(report):
            return note
        return (
            f"GradScaler left out the first {skips} of {total} while it searched for a loss scale. "
            "That is how it works, and no fault."
        )
    return f"GradScaler left out {skips} of {total}, no more than its search for a scale explains."


def _search_note(report: DiagnosisResult) -> str:
    """The note on the steps that a search for the loss scale has cost; "" without one."""
    return next((note for note in report.notes if note.startswith(SEARCH_NOTE)), "")


def next_step(report: DiagnosisResult, baseline: RunView) -> str:
    """What to do now."""
    diagnosis = report.diagnosis
    first = report.runs.get(BASELINE)
    state = first.state if first is not None else State.FINISHED
    if first is None:
        return "Diagnose the script:"
    if _is_kept_apart(report):
        return "Diagnose the script on the files themselves, which it then writes:"
    if could_not_run(report, baseline):
        return _AGAIN.get(state, "Fix the problem above, then diagnose the script again:")
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
        if use is not None and use.apart:
            return "Nothing, as far as it was judged: mixed precision needs no change there."
        if diagnosis.latent:
            advice = fix_words.sentence(diagnosis.latent[0], None)
            return f"The training needs no change so far. Against the latent finding: {advice}"
        if _search_note(report):
            return "The training needs no change; a lower initial scale loses fewer steps."
        return "Nothing: mixed precision needs no change here."
    cured = fix_words.best(report)
    advice = fix_words.sentence(diagnosis.findings[0], cured)
    if cured is not None:
        return f"{advice} A run with this fix removed the symptom; the patch is below."
    if (removed := fix_words.chosen(report)) is not None:
        advice = fix_words.sentence(diagnosis.findings[0], removed)
        return f"{advice} {fix_words.seen(report)}"
    return f"{advice} No run with a fix removed the symptom." if report.trials else advice


def _is_kept_apart(report: DiagnosisResult) -> bool:
    """Nothing is known but that a file could not be moved in the runs' view of the files."""
    return KEPT_APART in report.notes and not report.diagnosis.findings


def _towards_half(use: PrecisionUse) -> str:
    """How the next diagnosis judges AMP."""
    kinds = {reason.kind for reason in use.reasons}
    if "trainer_fp16" in kinds:
        return "Run it on a GPU, or ask the trainer for bf16, which it has on a CPU too."
    if rehearsal_helps(use):
        return "Run it on a GPU, or rehearse CUDA's rules on this CPU:"
    if "cuda_asked" in kinds:
        return "Run it on a GPU, or let it use torch.autocast('cpu') here; then diagnose it again:"
    return "Switch AMP on, then diagnose the script again:"


def when_undetermined(report: DiagnosisResult) -> str:
    """Advice that fits how the script ended and what is known of the fault."""
    fp32 = report.control_symptoms.get("fp32", ())
    if OUT_OF_MEMORY in fp32:
        return "The fp32 control ran out of memory: use a smaller batch, then diagnose it again:"
    if _raised_alone(report):
        return (
            "Let the script run in fp32 as well, so that there is something to compare with; then "
            "diagnose it again:"
        )
    if fp32:
        return (
            "The fp32 control fails too, so the cause is no half precision: look at the data, the "
            "learning rate and the place that is named above."
        )
    if any(note.startswith("The script does not reproduce") for note in report.notes):
        return "Seed every generator that the script uses, then diagnose it again:"
    if _search_note(report) and report.diagnosis.symptoms == (Symptom.BEHIND,):
        return "Lower the scaler's initial scale, so that more steps learn; then diagnose it again:"
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
    if report.control_symptoms.get("bf16") == () and not fix_words.is_in_bf16(report):
        lacks = BASELINE in report.runs and gpu_that_emulates_bf16(report.runs[BASELINE])
        what = "run the ops whose values leave it in fp32" if lacks else "use bf16"
        return f"It trains in bf16, so the range of fp16 is the likely trouble: {what}."
    return (
        "Compare the losses on the Diagnosis page: the script trains in fp32, but not in the "
        "baseline run."
    )


MORE_STEPS = 1000


def options(report: DiagnosisResult, baseline: RunView) -> str:
    """Options of the command that :func:`next_step` announces."""
    use = report.precision
    if _is_kept_apart(report):
        return " --in-place"
    if could_not_run(report, baseline) or use is None:
        return ""
    if use.no_half and report.diagnosis.verdict == "no_fault":
        return " --policy cuda" if rehearsal_helps(use) else ""
    return longer(report)


def longer(report: DiagnosisResult) -> str:
    """The option that moves the limit at which the script was stopped."""
    head = report.runs.get(BASELINE)
    if report.cut_short == "time" and head is not None and head.spec.time_limit_s:
        return f" --time-limit {4 * head.spec.time_limit_s:g}"
    return f" --steps {max(4 * report.judged_steps if report.cut_short else 0, MORE_STEPS)}"


MAX_INPUTS = 2
MAX_SHAPE = 4


def causal_chain(finding: Finding, run: RunView, symptoms: tuple[str, ...]) -> list[ChainLink]:
    """From the root cause to what a person sees, in order: input, first bad op, loss, skipped step.

    Each link is read off the baseline run; a cause that is no op (a clip before unscale_) stands at
    the head with its measurements in place of an op.
    """
    op = bad_op(finding, run)
    links = _op_links(op) if op is not None else [_cause_link(finding)]
    links += [
        ChainLink(CAUSES[c.cause].titled, c.verdict.reason, step=c.verdict.step)
        for c in finding.consequences
    ]
    links += _arrival(run, op.step if op is not None else finding.verdict.step)
    seen = "; ".join(symptoms) or "nothing, in the steps that were run"
    if finding.rule.is_of_compiler and not symptoms:
        seen = "the script trains in eager mode; with torch.compile on its numbers are others"
    links.append(ChainLink("What you see", seen))
    return links


def bad_op(finding: Finding, run: RunView) -> BadOp | None:
    """The recorded op that the finding names."""
    found = finding.verdict
    return next(
        (
            b
            for b in run.bad_ops
            if (b.op, b.line, b.step) == (found.op, found.line, found.step)
            and (b.module or None) == found.module
        ),
        None,
    )


def _op_links(op: BadOp) -> list[ChainLink]:
    inputs = [o for o in op.inputs if o.max_abs is not None] or list(op.inputs)
    links = []
    if inputs:
        detail = "; ".join(_operand(o) for o in inputs[:MAX_INPUTS])
        links.append(ChainLink("Input", detail, any(o.nonfinite for o in inputs), step=op.step))
    place = f" in {op.module}" if op.module else ""
    title = f"First bad op: {op.op}{place}, {op.phase}"
    links.append(ChainLink(title, _op_detail(op), op.kind == "nonfinite", True, op.step))
    return links


def _operand(operand: Operand) -> str:
    kind = "weight" if operand.is_parameter else "tensor"
    shape = "×".join(map(str, operand.shape[:MAX_SHAPE])) or "scalar"
    return f"{operand.dtype} {kind} {shape}, up to {value(operand.max_abs)}"


def _op_detail(op: BadOp) -> str:
    parts = [op.line] if op.line else []
    if op.kind == "nonfinite":
        bad = op.nan + op.pos_inf + op.neg_inf
        names = (("NaN", op.nan), ("+Inf", op.pos_inf), ("-Inf", op.neg_inf))
        kinds = ", ".join(f"{count:,} {name}" for name, count in names if count)
        parts.append(f"{share(bad, op.total)} not finite ({kinds})")
    elif op.error is not None:
        parts.append(f"{op.kind}: off by {value(op.error)}")
    if op.fp32_max is not None and op.dtype in FORMATS and op.dtype != "fp32":
        limit = value(FORMATS[op.dtype].max)
        parts.append(f"fp32 gives {value(op.fp32_max)}; {op.dtype} ends at {limit}")
    return "; ".join(parts)


def _cause_link(finding: Finding) -> ChainLink:
    found = finding.verdict
    measured = "; ".join(f"{m.name} {value(m.value)}" for m in found.evidence[:3])
    place = found.module or found.line
    title = CAUSES[finding.cause].titled + (f", {place}" if place else "")
    return ChainLink(title, measured or found.reason, is_root=True, step=found.step)


def _arrival(run: RunView, step: int | None) -> list[ChainLink]:
    """Where the trouble went from ``step`` on: loss, gradients, and the optimizer's step."""

    def lost_loss(of: OptimizerStep) -> bool:
        return of.loss is not None and not math.isfinite(of.loss)

    later = (one for one in run.steps if one.step >= (step or 0))
    bad = next((b for b in later if lost_loss(b) or b.grad_nonfinite or b.weight_nonfinite), None)
    if bad is None:
        return []
    links = []
    if lost_loss(bad):
        links.append(ChainLink("Loss", f"{value(bad.loss)} at step {bad.step}", True))
    if bad.grad_nonfinite:
        text = f"{share(bad.grad_nonfinite, bad.grad_total)} entries not finite at step {bad.step}"
        links.append(ChainLink("Gradients", text, True, step=bad.step))
    if bad.skipped:
        total = plural(len(run.steps), "step")
        text = f"GradScaler left step {bad.step} out; {len(run.skips):,} of {total} in all"
        links.append(ChainLink("Skipped step", text))
    elif bad.weight_nonfinite:
        entries = plural(bad.weight_nonfinite, "entry", "entries")
        links.append(ChainLink("Weights", f"{entries} not finite after step {bad.step}", True))
    return links
