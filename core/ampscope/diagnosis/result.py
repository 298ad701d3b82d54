"""What one diagnosis found, as every surface shows it: made by a live one and read back alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ampscope.analysis.compiled_runs import arms
from ampscope.analysis.gradient_loss import WRONG, gradient_error
from ampscope.analysis.lead import Lead, lead
from ampscope.analysis.precision_use import MIN_COMPARED, PrecisionUse, precision_use
from ampscope.analysis.repeatability import difference, draws_otherwise, is_reproducible
from ampscope.analysis.results import MOST_TOLD, ComparedResult, worse_results
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scale_facts import hand_scale_facts, scale_facts, static_scale
from ampscope.analysis.symptoms import Symptom, symptoms_of_control
from ampscope.control import BASELINE, COMPILED, Control
from ampscope.diagnosis.findings import Diagnosis
from ampscope.errors import BadInput
from ampscope.hardware.capability import emulates_bf16
from ampscope.number_words import plural, power_of_two
from ampscope.observations import COMPILED_NOTE, UNSTEPPED, HalfSite
from ampscope.policy import op_lists
from ampscope.policy.device_profiles import profile_of
from ampscope.records import RunInfo, State
from ampscope.rules.framework_patches import INITIAL_SCALE
from ampscope.rules.loss_scale_too_high import USUAL_INIT
from ampscope.rules.verdict import FP32_TRAINING, Fix, replaced_words
from ampscope.script_ends import ending

CONTROLS = ("fp32", "bf16")
MOST_NAMED = 4  # parameters, or lines, in a note
OUT_OF_MEMORY = "it ran out of memory, so there is nothing to compare with after that"
SEARCH_NOTE = "The scaler skipped the first"  # how the note on a long search begins
KEPT_APART = (
    "The script moves a file between folders that ampscope's private view of the files puts on two "
    "file systems: that is refused there (EXDEV), and says nothing of the training."
)
# Of HalfSite: what takes an array's numbers over as they are.
_OF_ARRAYS = {
    "torch.from_numpy", "torch.frombuffer", "torch.from_dlpack", "torch.tensor", "torch.as_tensor",
    "torch.asarray",
}  # fmt: skip
# Tried of a cause whose rule ``searches_modules``, after that search.
USE_BF16 = Fix("use_bf16", "Use bf16: it has the range of fp32.", controls=("bf16",))
SO_FAR = "Verdict so far: "  # begins the note on a diagnosis that was ended early


@dataclass(frozen=True, slots=True)
class CompiledRun:
    """A run with torch.compile on: what of the compiler it goes through, and what it showed beside
    the eager one, in words."""

    control: str
    through: str
    words: str


@dataclass(frozen=True, slots=True)
class Trial:
    """One fix that was run. ``cured`` is None where the pattern is removed and an effect cannot be
    measured (:mod:`.cure`). ``price`` is its processor time per optimizer step over the baseline's,
    None on CUDA; ``memory`` its peak memory over the baseline's (on a CPU, of the whole process).
    Both are None where CUDA was rehearsed."""

    control: str
    kind: str
    cured: bool | None
    price: float | None
    memory: float | None = None
    steps: int = 0  # optimizer steps of the run with the fix
    compared: int | None = None  # of these, after a search for the loss scale; None of older ones

    @property
    def is_too_short(self) -> bool:
        """The pattern is removed, and too few steps were made to see an effect."""
        short = self.compared is not None and self.compared < MIN_COMPARED
        return self.cured is None and short


@dataclass(frozen=True, slots=True)
class DiagnosisResult:
    """Everything that a surface shows of one diagnosis."""

    script: str
    diagnosis: Diagnosis
    runs: dict[str, RunInfo]
    trials: tuple[Trial, ...]  # fixes that were run, in order
    elapsed_s: float
    could_not_run: str = ""  # the sentence for exit status 2
    notes: tuple[str, ...] = ()
    output: str = ""
    control_symptoms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    judged_steps: int = 0  # optimizer steps of the baseline run
    cut_short: str = ""  # steps or time: the limit that ended it; "" when it came to its own end
    precision: PrecisionUse | None = None  # None of a script that never ran
    ended: str = ""  # how the baseline run ended (observations.Outcome)
    lead: Lead | None = None  # where to look when no rule names a cause
    rules: str = ""  # the version of the rules that drew a stored conclusion; "" of today's
    rank: int | None = None  # that was judged; None of a script that trains in one process
    compiled: tuple[CompiledRun, ...] = ()  # beside the eager one, in the order that was made
    sites: tuple[HalfSite, ...] = ()  # of the baseline run, in the order of their first calls
    results: tuple[ComparedResult, ...] = ()  # that the script reports, and fp32's are better

    @property
    def symptom_words(self) -> tuple[str, ...]:
        """The baseline run's symptoms, with the numbers that the script reports."""
        told = "; ".join(one.text for one in self.results)
        seen = self.diagnosis.symptoms
        return tuple(f"{s}: {told}" if s == Symptom.RESULTS and told else s for s in seen)

    @property
    def so_far(self) -> str:
        """The note on a diagnosis that is under way, or was ended before its time: how many of its
        fixes were run. "" of one that came to its end."""
        return next((note for note in self.notes if note.startswith(SO_FAR)), "")

    @property
    def was_stopped(self) -> bool:
        """ampscope ended the script at its limit of steps or time."""
        return self.ended in ("steps", "time")

    @property
    def scope(self) -> str:
        """Of what a clean bill is one: "" of the whole script, or of its first steps."""
        if not self.stopped_early or self.undecided or self.diagnosis.findings:
            return ""
        steps = f"{self.judged_steps:,} of the script's steps"
        use = self.precision
        head = f"No fault in the first {steps}"
        if use is not None and use.no_half:
            head += ", in fp32; what AMP does to this training was not judged"
        elif use is not None and use.too_few:
            head += ", which are too few to compare the training with its fp32 control"
        else:
            apart = "" if use is None else use.apart
            head += f": there it trains as its fp32 control does{apart}"
        return f"{head}. {self.stopped_early}"

    @property
    def stopped_early(self) -> str:
        """That a limit ended the script, and which option moves it; "" when it came to its end."""
        if not self.cut_short:
            return ""
        more = "--time-limit" if self.cut_short == "time" else f"--steps {4 * self.judged_steps}"
        return f"It was stopped there and may fail later; watch more of it with {more}."

    @property
    def undecided(self) -> str:
        """Why there is neither a fault nor a clean bill; "" when there is one of them."""
        if self.could_not_run or self.diagnosis.verdict != "inconclusive":
            return self.could_not_run
        if self.diagnosis.undecided:
            return self.diagnosis.undecided
        seen = "; ".join(self.symptom_words)
        text = f"Undetermined: {seen}. No rule has enough evidence to name the cause."
        return f"{text} {clue(self.lead)}"


def clue(found: Lead | None) -> str:
    """The sentence on where to look first."""
    if found is None:
        return (
            "No single recorded op shows it: each gave finite numbers, close to fp32's of the same "
            "inputs. Small errors add up over ops and steps, or numbers were lost outside them."
        )
    module = f"in module {found.module}" if found.module else ""
    step = f"step {found.step:,}" if found.step is not None else ""
    places = (module, found.phase, f"at {found.line}" if found.line else "", step)
    where = ", ".join(filter(None, places))
    return f"Where to look first: {found.what}" + (f" ({where})." if where else ".")


def report_of(
    diagnosis: Diagnosis,
    views: Mapping[str, RunView],
    runs: dict[str, RunInfo],
    trials: tuple[Trial, ...],
    elapsed_s: float,
    output: str = "",
) -> DiagnosisResult:
    """The report on runs that have ended; a script that could not be judged has a sentence."""
    first = runs.get(BASELINE) or next(iter(runs.values()))
    trials = tuple(under_policy(trial, diagnosis.policy) for trial in trials)
    unfinished = "" if diagnosis.findings else problem(first, views[BASELINE], views.get("fp32"))
    return DiagnosisResult(
        script=first.spec.workload,
        diagnosis=diagnosis,
        runs=runs,
        trials=trials,
        elapsed_s=elapsed_s,
        could_not_run=unfinished,
        notes=(*_notes(diagnosis, views), *_of_bf16(first, views), *_gaps(diagnosis, views)),
        output=output,
        judged_steps=(outcome := views[BASELINE].outcome).steps,
        cut_short=outcome.ended if outcome.ended in ("steps", "time") else "",
        control_symptoms={
            name: _of_control(views[name], views[BASELINE]) for name in CONTROLS if name in views
        },
        ended=views[BASELINE].outcome.ended,
        lead=None if diagnosis.findings else lead(views[BASELINE], views.get("fp32")),
        precision=precision_use(views[BASELINE], views.get("fp32")),
        sites=tuple(views[BASELINE].sites),
        rank=outcome.rank if outcome.ranks > 1 else None,
        results=_worse_results(views),
        compiled=tuple(
            CompiledRun(arm.control, arm.through, arm.words)
            for arm in (arms(views) if COMPILED in views else ())
        ),
    )


def _worse_results(views: Mapping[str, RunView]) -> tuple[ComparedResult, ...]:
    fp32 = views.get("fp32")
    return () if fp32 is None else tuple(worse_results(views[BASELINE], fp32)[:MOST_TOLD])


def partial_note(fixes_run: tuple[int, int] | None) -> str:
    """The note on a verdict of whose cause so many of at most so many fixes have been run; None
    while no cause is known."""
    if fixes_run is None:
        return f"{SO_FAR}no cause was found yet, and runs that may show one are missing."
    run, most = fixes_run
    if not run:
        return f"{SO_FAR}no fix was run."
    fixes = f"{most:,} {'fix' if most == 1 else 'fixes'}"
    return f"{SO_FAR}{run:,} of at most {fixes} {'was' if run == 1 else 'were'} run."


def gpu_that_emulates_bf16(info: RunInfo) -> str:
    """The GPU that the run computed on, or stood in for, where bf16 is emulated on it: "Tesla T4
    (compute capability 7.5)". "" for every other machine, and where it is not known."""
    machine = info.machine
    if machine is None:
        return ""
    name, capability = machine.device_name, machine.capability
    if machine.policy == "rehearsal":
        try:
            profile = profile_of(info.spec.rehearsed)
        except BadInput:  # of an imported run
            return ""
        name, capability = profile.name, "{}.{}".format(*profile.capability)
    elif not machine.device.startswith("cuda"):
        return ""
    return f"{name} (compute capability {capability})" if emulates_bf16(capability) else ""


def problem(info: RunInfo, view: RunView, fp32: RunView | None = None) -> str:
    """Why there is nothing to judge; "" when there is."""
    outcome = view.outcome
    if info.state in (State.FAILED, State.LOST, State.CANCELLED):
        return (
            info.message
            or f"The script's process exited without reporting an error ({info.state})."
        )
    if outcome.steps or view.guarded_losses or view.guarded_gradients:
        return ""  # also a script that left at once because of what it computed can be judged
    if view.ended_itself and not view.has_exception and fp32 is not None and fp32.outcome.steps:
        return ""  # it leaves before its first step, and in fp32 it does not
    return info.message or ending(outcome, info.spec)[1] or "The script made no optimizer step."


def _other_end(run: RunView, fp32: RunView) -> str:
    """How the script's end differs from that of its fp32 control; "" when both end alike."""
    own, reference = run.outcome, fp32.outcome
    if not run.ended_itself or (own.ended, own.exit_code, own.steps) == (
        reference.ended,
        reference.exit_code,
        reference.steps,
    ):
        return ""
    words = {"exception": f"with {own.error_type}", "exit": f"with exit status {own.exit_code}"}
    status = f" {words[own.ended]}" if own.ended in words else ""
    if not status and own.steps == reference.steps:
        return ""
    at_least = "" if fp32.ended_itself else "at least "
    return (
        f"The script ended{status} after {own.steps:,} optimizer steps; its fp32 control made "
        f"{at_least}{reference.steps:,}."
    )


def _of_control(view: RunView, baseline: RunView) -> tuple[str, ...]:
    """What is wrong with a control by itself; that it did not fit into memory says nothing of the
    training."""
    found = tuple(sorted(symptoms_of_control(view, baseline)))
    if not view.outcome.is_out_of_memory:
        return found
    others = (s for s in found if s is not Symptom.EXCEPTION)
    return (OUT_OF_MEMORY, *others)


def _without_scaler(run: RunView) -> str:
    """fp16 gradients without any loss scale are worth a note even where they did no harm so far. A
    part that is only evaluated, such as a reference model, has none."""
    outcome = run.outcome
    used = {d for use in run.line_uses if use.backward for d in (*use.takes, use.makes)}
    in_fp16 = any("fp16" in a.grad_dtypes for a in run.steps)
    in_fp16 |= bool(run.steps) and "fp16" in (used or outcome.flop_dtypes)
    by_hand = static_scale(run) is not None or hand_scale_facts(run) is not None
    if not in_fp16 or run.has_scaler or by_hand or outcome.framework != "torch":
        return ""
    return (
        "The script trains in fp16 without a GradScaler: gradients below 6e-8 become zero. That is "
        "no fault by itself; a scaler keeps it from becoming one."
    )


def _unstepped(run: RunView) -> str:
    """Parameters that learn nothing although gradients come to them; "" without any."""
    names = [use.module for use in run.uses if use.name == UNSTEPPED]
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    are, they = ("is", "It stays as it is") if len(names) == 1 else ("are", "They stay as they are")
    return (
        f"{plural(len(names), 'parameter')} got gradients and {are} in no optimizer that stepped in"
        f" the recorded steps: {', '.join(names[:MOST_NAMED])}{more}. {they}."
    )


def _long_search(run: RunView) -> str:
    """How many steps a search for the loss scale has cost, and with which initial scale it would
    not; "" where it cost few, has not ended, or went below 1, where gradients are the trouble."""
    facts = scale_facts(run)
    if facts is None or not facts.loses_many or run.bad_loss_steps:
        return ""
    taken = [a.scale for a in run.steps[facts.leading :] if a.scaler and not a.skipped]
    held = min(taken, default=0.0)
    if held < 1:
        return ""
    start = min(USUAL_INIT, held)
    argument = INITIAL_SCALE.get(run.outcome.framework, INITIAL_SCALE["torch"])
    return (
        f"{SEARCH_NOTE} {facts.leading:,} of {plural(facts.total, 'optimizer step')} "
        f"while it searched for a loss scale, from {power_of_two(facts.first)} down to "
        f"{power_of_two(held)}. That is no fault, but nothing was learned in these steps. Start "
        f"the scaler with a lower scale: {argument}={start:.6g}."
    )


def _of_gradients(run: RunView, fp32: RunView) -> list[str]:
    """First gradients that are far from fp32's are worth a note, whatever makes them so."""
    found = gradient_error(run, fp32)
    if found is None or found.error < WRONG:
        return []
    return [
        "At the first step, where the weights are the same, the gradients differ from the fp32 "
        f"control's by {found.error:.0%} of their norm, most in {found.parameter}. Healthy bf16 "
        "training stays below a third."
    ]


def _of_bf16(info: RunInfo, views: Mapping[str, RunView]) -> list[str]:
    """Why a healthy run in bf16 is no fix, where the GPU cannot compute in it."""
    gpu = gpu_that_emulates_bf16(info) if "bf16" in views else ""
    if not gpu:
        return []
    return [
        f"{gpu} has no bf16 instructions: there bf16 is emulated, which is slow, and is no fix. "
        "What it has is fp16, with a loss scale, and fp32 where the range of fp16 is left. The run "
        "in bf16 only shows whether that range is the trouble."
    ]


def _gaps(diagnosis: Diagnosis, views: Mapping[str, RunView]) -> list[str]:
    """What CUDA computes otherwise than the CPU that the verdict comes from."""
    op = diagnosis.findings[0].verdict.op if diagnosis.findings else None
    return op_lists.texts(views[BASELINE].outcome.gaps, diagnosis.policy, op or "")


def _notes(diagnosis: Diagnosis, views: Mapping[str, RunView]) -> tuple[str, ...]:
    """What a person must know beside the verdict: how the runs were made."""
    outcome = views[BASELINE].outcome
    blamed = any(finding.rule.is_of_compiler for finding in diagnosis.findings)
    was_compiled = COMPILED in views and bool(blamed or diagnosis.notes or diagnosis.undecided)
    notes = [*diagnosis.notes, *outcome.notes]
    if was_compiled:  # what the verdict says of compiled code takes the place of the warning
        notes = [note for note in notes if note != COMPILED_NOTE]
    if note := _without_scaler(views[BASELINE]):
        notes.append(note)
    if note := _unstepped(views[BASELINE]):
        notes.append(note)
    said = replaced_words(views[BASELINE])
    if said and not any(said in finding.verdict.reason for finding in diagnosis.findings):
        notes.append(said)
    if not diagnosis.findings and (note := _long_search(views[BASELINE])):
        notes.append(note)
    if "fp32" in views and not (diagnosis.findings or diagnosis.latent):
        notes += _of_gradients(views[BASELINE], views["fp32"])
    if outcome.ended == "steps":
        notes.append(f"Stopped after {outcome.steps} optimizer steps.")
    if outcome.ended == "time":
        notes.append(f"Stopped at the time limit after {outcome.steps} optimizer steps.")
    if "fp32" in views and (told := _other_end(views[BASELINE], views["fp32"])):
        notes.append(told)
    if "fp32" in views and (note := _of_beginnings(views[BASELINE], views["fp32"])):
        notes.append(note)
    if not diagnosis.findings and (note := _of_arrays(views[BASELINE])):
        notes.append(note)
    return tuple(notes)


def _of_arrays(run: RunView) -> str:
    """That numbers were half before torch got them, so that no control could keep them in fp32; ""
    where none were. Of a file, the script may have written it itself, in the control in fp32."""
    found = [s for s in run.sites if s.kind == "loaded" and s.op in _OF_ARRAYS]
    if not found:
        return ""
    lines = [*dict.fromkeys(s.line for s in found)]
    more = ", …" if len(lines) > MOST_NAMED else ""
    return (
        f"Numbers came to torch in {found[0].dtype} out of an array, at "
        f"{', '.join(lines[:MOST_NAMED])}{more}. What was rounded outside torch is rounded in the "
        "fp32 control too, and was not judged."
    )


def _of_beginnings(run: RunView, fp32: RunView) -> str:
    """How the script and its fp32 control begin unlike each other, and whether chance makes it so;
    "" where they begin alike."""
    what = difference(run, fp32)
    if not what:
        return ""
    if draws_otherwise(run, fp32):
        return (
            f"Random numbers are drawn in another dtype in the fp32 control, so {what} differ. The "
            "script is judged on what the runs have in common."
        )
    said = f"The script and its fp32 control do not begin alike: {what} differ."
    if run.repeat is None:
        return f"{said} The script is judged on what the runs have in common."
    if is_reproducible(run, run.repeat):
        return f"{said} Two unchanged runs agree, so half precision made the difference before."
    return (
        "The script does not reproduce its own losses from run to run: two unchanged runs differ. "
        "It is judged on what the runs have in common; a fixed seed makes the verdict sharper."
    )


def trial_of(
    control: str, fix: Fix, fixed: RunView, before: RunView, *, cured: bool | None
) -> Trial:
    """The trial that a run under ``control`` was, with what it costs."""
    peaks = fixed.outcome.peak_bytes, before.outcome.peak_bytes
    memory = peaks[0] / peaks[1] if all(peaks) and not Control(control).is_compiled else None
    steps = len(fixed.steps)
    compared = steps - fixed.leading_skips
    kind, cost = kind_of(control, fix), price(fixed, before)
    kind = FP32_TRAINING if is_everything(control, before) else kind
    return Trial(control, kind, cured, cost, memory, steps, compared)


def under_policy(trial: Trial, policy: str) -> Trial:
    """The trial without time and memory where CUDA was rehearsed: a CPU's are none of CUDA's."""
    return replace(trial, price=None, memory=None) if policy == "rehearsal" else trial


def price(fixed: RunView, before: RunView) -> float | None:
    """Processor time per step of the fixed run over the baseline's, where both had the same
    instruments, else None: a run whose ops were not seen says none, and a compiled one has others,
    and its few steps are mostly compilation."""
    if Control(fixed.control).is_compiled:
        return None
    own, other = fixed.outcome.step_cpu_s, before.outcome.step_cpu_s
    return own / other if own > 0 and other > 0 else None


def kind_of(control: str, fix: Fix) -> str:
    """Fix kind of what was really run, which may be another than the rule's first choice."""
    return Control(control).fix_kind or fix.kind


def modules_with_parameters(view: RunView) -> list[str]:
    """Modules that own parameters, as candidates for fp32."""
    names = [s.name.rpartition(".")[0] for s in view.scans if s.moment == "start"]
    return [name for name in dict.fromkeys(names) if name]


def is_everything(control: str, view: RunView) -> bool:
    """Whether ``control`` puts every module of ``view`` in fp32: fp32 training by another name."""
    names = modules_with_parameters(view)
    return len(names) > 1 and set(Control(control).values("fp32_modules")) == set(names)
