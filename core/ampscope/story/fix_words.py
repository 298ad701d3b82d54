"""A fix in words and as a patch: what a run has shown to work, else what the rule advises."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

from ampscope.analysis.hand_casts import without_casts
from ampscope.analysis.lifting import lifted
from ampscope.analysis.symptoms import Symptom
from ampscope.causes import CAUSES
from ampscope.control import BASELINE, COMPILED, Control
from ampscope.diagnosis.findings import Finding
from ampscope.diagnosis.result import DiagnosisResult, Trial
from ampscope.number_words import number, plural, share
from ampscope.records import RunInfo, StepRecord, StepTotals
from ampscope.rules import framework_patches
from ampscope.rules.verdict import FIX_KINDS, FP32_TRAINING, Verdict, island_patch

CONTROLS = (BASELINE, "fp32", "bf16")  # that every diagnosis may run


def best(report: DiagnosisResult) -> Trial | None:
    """Of the fixes that worked, the one that the rule prefers; of sets of modules the smallest,
    and a line before any of several. All modules in fp32 are none."""
    if not report.diagnosis.findings:
        return None
    wanted = report.diagnosis.findings[0].verdict.fix.controls

    def place(trial: Trial) -> tuple[bool, int, int]:
        known = trial.control in wanted
        modules = max(1, _modules(trial))
        return modules > 1, wanted.index(trial.control) if known else len(wanted), modules

    return min((t for t in _smallest(report) if t.cured is True), key=place, default=None)


def chosen(report: DiagnosisResult) -> Trial | None:
    """The fix to advise: the best that worked, else the first that removed the pattern."""
    return best(report) or next((t for t in _smallest(report) if t.cured is None), None)


def _smallest(report: DiagnosisResult) -> list[Trial]:
    """The fixes that worked or removed the pattern; of sets of modules, which a search makes
    smaller and smaller, the smallest alone."""
    left = [t for t in report.trials if t.cured is not False and t.kind != FP32_TRAINING]
    least = min(filter(None, map(_modules, left)), default=0)
    return [t for t in left if _modules(t) in (0, least)]


def _modules(trial: Trial) -> int:
    return len(Control(trial.control).values("fp32_modules"))


def verified(report: DiagnosisResult) -> bool | None:
    """True when a run with a fix removed the symptom, False when no such run did; None when none
    was run, or when an effect could not be measured."""
    trial = chosen(report)
    return trial.cured if trial is not None else (False if report.trials else None)


def outcome(trial: Trial, run: RunInfo | None = None) -> str:
    """What one trial showed, in few words; of a ``run`` that raised, what and where."""
    if trial.kind == FP32_TRAINING and trial.cured is not False:
        return "trains, in fp32 throughout"
    if trial.is_too_short:
        count = trial.compared or 0
        few = f"{plural(count, 'taken step')} {'is' if count == 1 else 'are'} too few"
        return f"inconclusive: the cause is found no more, but {few} to tell"
    if trial.cured is None:
        return f"pattern removed; effect not measurable in {plural(trial.steps, 'step')}"
    if not trial.cured and run is not None and run.message:
        return f"not cured: {_said(run)}"
    return "cured" if trial.cured else "not cured"


def _said(run: RunInfo) -> str:
    """How the run ended, behind a colon."""
    return run.message[:1].lower() + run.message[1:].rstrip(".")


def each_run(report: DiagnosisResult) -> str:
    """What each run beside the baseline and its controls showed; the same outcome of several is
    said once, and a search for the sites that harm is one outcome."""
    found: dict[str, list[str]] = {}
    for trial in report.trials:
        said = outcome(trial, report.runs.get(trial.control))
        found.setdefault(said, []).append(_with_name(trial.control))
    others = _others(report)
    lifts = [c for c, _ in others if lifted(c) and not report.runs[c].message]
    searches = {*lifts} if len(lifts) > 1 else set()
    for control, said in others:
        if control not in searches:
            found.setdefault(said, []).append(_with_name(control))
    parts = [f"{', '.join(names)}: {said}" for said, names in found.items()]
    if searches:
        parts.append(f"{len(searches)} more with other sites in fp32: the search for these")
    return "; ".join(parts)


def _others(report: DiagnosisResult) -> list[tuple[str, str]]:
    """Runs that are neither a trial nor told by :func:`run_lines`, each with what it gave: those
    of the compiler's layers, and those that say nothing of a fix (out of memory, stopped, cut
    short, a reference for another run)."""
    known = {BASELINE, *report.control_symptoms, *(t.control for t in report.trials)}
    compiled = {run.control: run.words for run in report.compiled}
    return [
        (control, compiled.get(control) or (_said(run) if run.message else _length(run)))
        for control, run in report.runs.items()
        if control not in known
    ]


def _length(run: RunInfo) -> str:
    return f"{plural(run.steps_done, 'step')}, not judged as a fix"


MAX_NAMED = 3  # modules of a set


def _short_words(control: str) -> str:
    """:attr:`Control.words`, with a large set of modules as their number, first and last."""
    paths = Control(control).values("fp32_modules")
    if len(paths) <= MAX_NAMED:
        return Control(control).words
    return f"with {len(paths):,} modules in fp32, {paths[0]} to {paths[-1]}"


def _with_name(control: str) -> str:
    words = _short_words(control)
    return f"{words} ({control})" if words == Control(control).words else words


def state(report: DiagnosisResult) -> str:
    """A key figure's word for the fixes."""
    if not report.trials:
        return "not tried"
    if (trial := chosen(report)) is not None and trial.is_too_short:
        return "inconclusive"
    return {True: "verified", False: "none worked", None: "not measurable"}[verified(report)]


def sentence(finding: Finding, cured: Trial | None) -> str:
    """What to change, in one sentence; of two that say the same, the rule's own."""
    fix = finding.verdict.fix
    tried = Control(cured.control if cured is not None else "").first
    word, places = tried.name, tried.values
    names = ", ".join(places)
    if word == "fp32_lines" and fix.kind == "drop_cast":
        return fix.text
    if word == "fp32_lines" and fix.kind == "rewrite_op" and fix.text:
        return f"{fix.text} It was run with {names} in fp32."
    if word == "fp32_lines":
        return f"Compute {names} in fp32."
    if word == "fp32_modules" and places != (finding.verdict.module,):
        return f"Keep {names} in fp32."
    if cured is None or cured.kind == fix.kind:
        return fix.text or FIX_KINDS[fix.kind]
    if word == "fp32_state" and fix.kind == "fp32_params":
        # The patch is the rule's own; what was run keeps fp32 copies beside the half weights.
        return f"{fix.text} It was run with fp32 master weights."
    if word == "fp32_modules":
        return f"Keep {names} in fp32."
    return FIX_KINDS[cured.kind]


def patch(finding: Finding, cured: Trial | None) -> str:
    """Code to paste: for the modules whose fix was verified, else as the rule wrote it."""
    fix = finding.verdict.fix
    if fix.framework != "torch":
        made = replace(fix, kind=cured.kind, controls=(cured.control,)) if cured else fix
        return framework_patches.patch(made)
    tried = Control(cured.control if cured is not None else "").first
    word, places = tried.name, tried.values
    if word == "lr":
        return f'for group in optimizer.param_groups:\n    group["lr"] *= {places[0]}\n'
    if word == "fp32_modules" and (
        places != (finding.verdict.module,) or fix.kind != "fp32_module"
    ):
        return island_patch(*places)
    if word == "fp32_lines" and fix.kind != "drop_cast":
        return _line_patch(finding, places)
    if word == "bf16" and fix.kind != "use_bf16":
        return _in_bf16(finding.verdict)
    if fix.patch == island_patch("") and finding.verdict.line:
        return _line_patch(finding, (finding.verdict.line,))
    return fix.patch


def _in_bf16(verdict: Verdict) -> str:
    """What was run, as code: autocast in bf16, and casts to fp16 by hand, which no autocast owns,
    as casts to bf16."""
    code = re.sub(r"\.half\(\)", ".bfloat16()", verdict.code)
    code = re.sub(r"\btorch\.(float16|half)\b", "torch.bfloat16", code)
    if code != verdict.code:
        return f"# {verdict.line}, and likewise every other cast to fp16; no GradScaler\n{code}\n"
    return (
        "with torch.autocast(device_type, dtype=torch.bfloat16):\n    ...  # no GradScaler\n"
        "# where the script casts by hand: .bfloat16() in place of .half()\n"
    )


def seen(report: DiagnosisResult) -> str:
    """What the runs with a fix showed."""
    cured = best(report)
    if cured is not None:
        price = f", at {cured.price:.2f} times the processor time per step" if cured.price else ""
        if cured.memory:
            price += f"{' and' if price else ', at'} {cured.memory:.2f} times the peak memory"
        run = f"the script was run {Control(cured.control).words}"
        return f"Verified: {run}, and the symptom was gone{price}."
    removed = chosen(report)
    if removed is not None and removed.is_too_short:
        return (
            f"Inconclusive: too few steps to tell. The script was run "
            f"{Control(removed.control).words}, and the cause is found no more. Of "
            f"{plural(removed.steps, 'step')}, {removed.compared or 0:,} followed the search for "
            f"the loss scale: too few to compare the loss with fp32's. {_more(report)}"
        )
    if removed is not None:
        return (
            f"Pattern removed: the script was run {Control(removed.control).words}, and the cause "
            f"is found no more. The effect is not measurable in {plural(removed.steps, 'step')}."
        )
    partial = [t for t in report.trials if t.kind != FP32_TRAINING]
    tried = "; ".join(_short_words(t.control) for t in partial)
    said = f"No fix removed the symptom. Tried: {tried}." if tried else ""
    if any(t.kind == FP32_TRAINING and t.cured is not False for t in report.trials):
        said += f" The symptom is gone in fp32 alone. {FIX_KINDS[FP32_TRAINING]}"
    return said.strip() or "No fix removed the symptom."


def _more(report: DiagnosisResult) -> str:
    """How to get more steps: by the option whose limit ended the script, else by the script."""
    if report.cut_short == "time":
        return "More time for each run: --time-limit."
    if report.cut_short:
        return f"More steps: --steps {max(4 * report.judged_steps, 40)}."
    return "The script ends by itself: let it make more steps; --steps sets how many are run."


def change(before: DiagnosisResult, after: DiagnosisResult) -> str:
    """What the rules of today say otherwise than the ones that drew the conclusion."""
    told = [_in_short(report) for report in (before, after)]
    if told[0] == told[1]:
        return "Judged again with the rules of today: the same cause and fix."
    return f"Judged again with the rules of today. Before: {told[0]}. Now: {told[1]}."


def _in_short(report: DiagnosisResult) -> str:
    if not report.diagnosis.findings:
        return "undetermined" if report.undecided else "no fault found"
    finding = report.diagnosis.findings[0]
    at = finding.verdict.line or finding.verdict.module
    fix = chosen(report)
    done = f"{state(report)}: run {Control(fix.control).words}" if fix else state(report)
    return f"{CAUSES[finding.cause].titled}{f' at {at}' if at else ''} (fix {done})"


def candidates(report: DiagnosisResult) -> list[str]:
    """Controls to run again: the one that worked first, then what the rule names."""
    cured = chosen(report)
    words = [cured.control] if cured is not None else []
    return list(dict.fromkeys([*words, *report.diagnosis.findings[0].verdict.fix.controls]))


def compared(report: DiagnosisResult) -> list[tuple[str, str]]:
    """Name and control of the runs to show side by side: the baseline, in fp32 and in bf16,
    compiled where the compiler is to blame, and the fix that worked (else the last that was
    tried)."""
    words = (*CONTROLS, COMPILED) if _is_of_compilers(report) else CONTROLS
    found = [(_run_name(report, word), word) for word in words]
    cured = chosen(report) or (report.trials[-1] if report.trials else None)
    if cured is not None and cured.control not in CONTROLS:
        kind = "fixed" if cured.cured else "tried"
        found.append((f"{kind}, {Control(cured.control).words}", cured.control))
    return found


def _is_of_compilers(report: DiagnosisResult) -> bool:
    return any(finding.rule.is_of_compiler for finding in report.diagnosis.findings[:1])


TRIAL_COLUMNS = ("The script was run", "Seen", "Processor time per step", "Peak memory")


def trial_rows(report: DiagnosisResult) -> tuple[tuple[str, ...], ...]:
    """Every run beside the baseline and its controls, under :data:`TRIAL_COLUMNS`."""
    unknown = "rehearsed, not CUDA's" if report.diagnosis.policy == "rehearsal" else "not known"
    trials = (
        (
            _short_words(t.control),
            outcome(t, report.runs.get(t.control)),
            f"{t.price:.2f} times" if t.price else unknown,
            f"{t.memory:.2f} times" if t.memory else unknown,
        )
        for t in report.trials
    )
    others = ((_short_words(control), said, unknown, unknown) for control, said in _others(report))
    return (*trials, *others)


# What went wrong comes first: a narrow window shows two columns. Batches that a script leaves out
# are no steps.
CONTROL_COLUMNS = (
    "Control", "What went wrong", "Last loss", "Steps with NaN or Inf loss", "Skipped steps",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ControlRun:
    """One run beside the others: exact counts, and the steps that are drawn."""

    name: str
    run: RunInfo
    steps: list[StepRecord]
    totals: StepTotals

    @property
    def last_loss(self) -> float | None:
        """Of the last step that has one; None where none has."""
        return next((s.loss for s in reversed(self.steps) if s.loss is not None), None)


def control_row(report: DiagnosisResult, control: ControlRun) -> tuple[str, ...]:
    """One run under :data:`CONTROL_COLUMNS`."""
    totals, last = control.totals, control.last_loss
    return (
        control.name,
        went_wrong(report, control.run),
        "none" if last is None else number(last),
        *(
            share(count, totals.steps) if count else f"0 of {totals.steps:,}"
            for count in (totals.nonfinite_losses, totals.skipped)
        ),
    )


def went_wrong(report: DiagnosisResult, run: RunInfo) -> str:
    """The symptoms of a run under a control, or what a trial showed."""
    word = run.spec.control
    if word == BASELINE or word in report.control_symptoms:
        return symptoms_seen(report, word) or _unseen(report, word) or "nothing"
    if word == COMPILED and _is_of_compilers(report):
        return "its numbers are not eager code's"
    trial = next((t for t in report.trials if t.control == word), None)
    if trial is None:
        return run.message or "not judged"
    if trial.cured is None:
        return outcome(trial)
    return "nothing any more" if trial.cured else "the symptom or its cause is still there"


def symptoms_seen(report: DiagnosisResult, word: str) -> str:
    """What is wrong with the baseline run or a control; of an exception what was raised and
    where. "" where nothing is."""
    run = report.runs.get(word)
    raised = _said(run) if run is not None and run.message else str(Symptom.EXCEPTION)
    of_control = report.control_symptoms.get(word, ())
    found = report.symptom_words if word == BASELINE else of_control
    return "; ".join(raised if s == Symptom.EXCEPTION else s for s in found)


def run_lines(report: DiagnosisResult) -> list[str]:
    """A sentence on the baseline run, and one on each control."""
    lines = []
    for word in (BASELINE, *report.control_symptoms):
        seen_there = symptoms_seen(report, word) or _unseen(report, word) or "healthy"
        lines.append(f"Run {_run_name(report, word)}: {seen_there}.")
    return lines


def _run_name(report: DiagnosisResult, word: str) -> str:
    """What a run is called beside the others: bf16 is none of a script that trains in it."""
    is_own = word == "bf16" and is_in_bf16(report)
    own = ", the script's own precision, without its loss scale" if is_own else ""
    return f"{Control(word).words}{own}"


def _unseen(report: DiagnosisResult, word: str) -> str:
    """What to say of the baseline run where a cause was found without a symptom; "" elsewhere."""
    if word != BASELINE or not report.diagnosis.findings:
        return ""
    return "none of the symptoms that are looked for; what is wrong is said above"


def is_in_bf16(report: DiagnosisResult) -> bool:
    """Whether bf16 is the one half format that the baseline run computed in."""
    use = report.precision
    return use is not None and {d for d, _ in use.flops} & {"fp16", "bf16"} == {"bf16"}


_WIDE = """import contextlib

import torch


def as_fp32(value):
    \"\"\"A half tensor in fp32, fp32 for a half dtype; anything else unchanged.\"\"\"
    half = (torch.float16, torch.bfloat16)
    if isinstance(value, torch.dtype):
        return torch.float32 if value in half else value
    if type(value) in (list, tuple):
        return type(value)(map(as_fp32, value))
    return value.float() if torch.is_tensor(value) and value.dtype in half else value


def autocast_off():
    stack = contextlib.ExitStack()
    for device_type in ("cpu", "cuda", "mps", "xpu"):
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


"""
_CALL = """def in_fp32(function, *args, **kwargs):
    \"\"\"The call with its tensors in fp32 and autocast off: in_fp32(torch.matmul, a, b).\"\"\"
    with autocast_off():
        return function(*map(as_fp32, args), **{k: as_fp32(v) for k, v in kwargs.items()})


# PLACE: write each call of this line as in_fp32(function, …).
"""


def _line_patch(finding: Finding, lines: tuple[str, ...]) -> str:
    """What was run, as code: the finding's line in fp32; behind it a rule's own rewriting."""
    verdict = finding.verdict
    statement = _widened(verdict.code) if lines == (verdict.line,) else ""
    text = f"{_WIDE}{(statement or _CALL).replace('PLACE', ', '.join(lines))}"
    rewriting = verdict.fix.patch if verdict.fix.kind == "rewrite_op" else ""
    return (
        f"{text}\n# or, written so that half precision holds it:\n{rewriting}"
        if rewriting
        else text
    )


def _widened(code: str) -> str:
    """A line of a script with the values that it reads in ``as_fp32()``, below ``autocast_off()``;
    "" where the line is no whole statement, changes a tensor in place, or reads none."""
    try:
        (statement,) = ast.parse(without_casts(code)).body
    except (SyntaxError, ValueError, RecursionError):
        return ""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return) or not statement.value:
        return ""
    widener = _Widener()
    statement.value = widener.visit(statement.value)
    if not widener.has_values or widener.is_in_place:
        return ""
    text = ast.unparse(ast.fix_missing_locations(statement))
    return f"# in place of PLACE\nwith autocast_off():\n    {text}\n"


class _Widener(ast.NodeTransformer):
    """Puts each value that an expression reads into ``as_fp32()``; functions and modules stay."""

    _HALF = frozenset(("float16", "half", "bfloat16"))
    _MODULES = frozenset(("torch", "F", "nn", "np", "numpy", "math", "functional", "einops"))

    def __init__(self) -> None:
        self.has_values = self.is_in_place = False

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A variable."""
        return self._wide(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """``self.weight``, ``batch.x``, ``torch.float16``, and what a call gives."""
        if _root(node) == "torch" and node.attr in self._HALF:
            return ast.Attribute(node.value, "float32", ast.Load())
        return self._wide(node) if _root(node) else self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """``batch["x"]``, ``x[:, i]``; an index is left alone."""
        if _root(node):
            return self._wide(node)
        node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The arguments, and of a tensor's method the tensor."""
        function = node.func
        if isinstance(function, ast.Attribute):
            self.is_in_place |= function.attr.endswith("_") and not function.attr.endswith("__")
            if _root(function) not in {*self._MODULES, "self", "cls"}:
                function.value = self.visit(function.value)
        elif not isinstance(function, ast.Name):
            node.func = self.visit(function)
        node.args = [self.visit(argument) for argument in node.args]
        node.keywords = [self.visit(argument) for argument in node.keywords]
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        """What is gone through, not the name that it gets."""
        node.iter = self.visit(node.iter)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        """Its names are its own."""
        return node

    def _wide(self, node: ast.expr) -> ast.AST:
        if _root(node) in self._MODULES or _root(node) == ast.unparse(node) == "self":
            return node
        self.has_values = True
        return ast.Call(ast.Name("as_fp32", ast.Load()), [node], [])


def _root(node: ast.AST) -> str:
    """``a`` of ``a.b[0].c``; "" where a call or another expression is at its root."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
