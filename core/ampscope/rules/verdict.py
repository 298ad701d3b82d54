"""What a rule is and what it answers.

A rule file holds a docstring under fixed headings (What it detects, Why it matters, Blind spots,
Remedy), which the dashboard shows, one function ``check`` and one constant ``RULE``. Verdicts that
several rules build alike, of one bad op or of an exception of the script's own, are made by
:func:`op_verdict` and :func:`error_verdict`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives, RootOp
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE, Control
from ampscope.numerics.formats import FORMATS
from ampscope.observations import INACCURATE_ERROR, BadOp

FP16_MAX = FORMATS["fp16"].max


class Status(StrEnum):
    """Answer of one rule."""

    PASSED = "passed"
    FOUND = "found"
    LATENT = "latent"  # numbers are being lost, and the training has not suffered so far
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not_applicable"
    ERRORED = "errored"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number (or word) behind a verdict, and where it was measured."""

    name: str
    value: float | str
    threshold: float | str | None = None
    run: str = ""
    step: int | None = None


FP32_TRAINING = "fp32_training"
# The kinds of fix, and the sentence that introduces one.
FIX_KINDS: dict[str, str] = {
    "use_bf16": "Use bfloat16: it has the range of fp32 and needs no loss scale.",
    "fp32_module": "Keep these modules in fp32.",
    "add_scaler": "Scale the loss with a GradScaler.",
    "change_scale": "Change the loss scale.",
    "move_unscale": "Call scaler.unscale_(optimizer) before gradients are clipped or read.",
    "raise_eps": "Use a larger epsilon.",
    "rewrite_op": "Rewrite the expression.",
    "drop_cast": "Leave out the cast to half precision.",
    "fp32_params": "Keep the parameters in fp32 and let autocast choose the compute precision.",
    "fp32_optimizer_state": "Keep the optimizer's state in fp32.",
    "fix_data": "Repair or drop the bad samples.",
    "lower_lr": "Lower the learning rate, or warm it up.",
    "fix_init": "Initialise the weights properly.",
    "guard_reduction": "Guard the reduction against an empty set.",
    "scaler_protocol": "Call the scaler's methods in their order, once each.",
    "save_scaler_state": "Save and load the scaler's state with the checkpoint.",
    "refresh_copies": "Cast the weights anew after they have changed.",
    "separate_scalers": "Use one scaler for each loss and optimizer.",
    "emulate_casts": "Let the compiler round where eager code rounds.",
    "change_backend": "Compile with another backend.",
    "no_compile": "Leave a part uncompiled.",
    "keep_unfused": "Keep an op out of the compiler's kernels.",
    FP32_TRAINING: "All modules in fp32 is fp32 training, and no fix of mixed precision: AMP does "
    "not suit this training, or the cause lies elsewhere.",
    "none": "Nothing needs to change.",
}


@dataclass(frozen=True, slots=True)
class Fix:
    """What to change. ``controls`` are the interventions that try it, best first."""

    kind: str  # of FIX_KINDS
    text: str
    patch: str = ""
    controls: tuple[str, ...] = ()
    framework: str = "torch"  # whose code the patch is


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule's answer; the fields below ``reason`` are filled when the cause was found."""

    status: Status
    reason: str = ""
    module: str | None = None
    op: str | None = None
    phase: str | None = None
    step: int | None = None
    line: str = ""
    code: str = ""
    severity: str = "error"
    evidence: tuple[Measurement, ...] = ()
    fix: Fix = field(default_factory=lambda: Fix("none", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """All that ampscope knows of one root cause. Code that treats a cause otherwise than the rest
    asks a field here; no other module keeps a list of causes."""

    code: str  # "AMP012", for good: a cause that is given up keeps it, and a new one takes the next
    id: str
    title: str
    definition: str

    check: Callable[[Evidence], Verdict]
    needs: tuple[str, ...]  # controls without which there is no answer
    needs_ops: bool = True  # judges single ops or calls, which are recorded of PyTorch alone
    last_resort: Callable[[Evidence], Verdict] | None = None  # where no rule explains the symptoms
    documentation: str = ""  # the docstring of its file

    # Among findings. ``explains``: causes that are its consequences where both are found;
    # ``explained_by`` says the same from the other side, so that a new cause names both itself.
    order: int  # of findings that are no consequences of each other; smaller is nearer the root
    explains: tuple[str, ...] = ()
    explained_by: tuple[str, ...] = ()

    # How its fixes are tried and judged (:mod:`ampscope.diagnosis.cure`).
    searches_modules: bool = False  # the smallest set of modules in fp32 is a fix, and bf16 another
    is_measured: bool = False  # it compares numbers with fp32's: what it finds is a symptom itself
    must_cure_fp32: bool = False  # fp32 fails too: a fix has to train in half precision and in fp32
    is_of_compiler: bool = False  # eager code trains: a fix brings its numbers back
    # (baseline, run with a fix): whether the pattern is gone, where ``check`` would see it again.
    is_removed: Callable[[RunView, RunView], bool] | None = None
    is_of_site: bool = False  # a lifted site without a name: one that names it takes its place
    leaves_symptoms: bool = False  # another fault's: that the pattern is gone is the cure

    # What can decide it. None: where its verdict names an op.
    in_one_step: bool | None = None  # whether one captured step can
    in_ops: bool | None = None  # whether ops computed it, which compiled code may do otherwise


def latent(reason: str, fix: Fix, *evidence: Measurement) -> Verdict:
    """What the cause would do is measured, and the training has not suffered from it so far."""
    return Verdict(Status.LATENT, reason, evidence=evidence, fix=fix)


def passed(reason: str = "") -> Verdict:
    """The cause was looked for and is not there."""
    return Verdict(Status.PASSED, reason)


def not_applicable(reason: str) -> Verdict:
    """The script has nothing that the cause could concern."""
    return Verdict(Status.NOT_APPLICABLE, reason)


def inconclusive(reason: str) -> Verdict:
    """What was recorded cannot decide."""
    return Verdict(Status.INCONCLUSIVE, reason)


def error_verdict(evidence: Evidence, fix: Fix, reason: str = "") -> Verdict:
    """Found: the words of the exception that the script itself raised are the evidence."""
    run = evidence.baseline
    outcome = run.outcome
    text = outcome.error_text.strip().splitlines()[0][:300] if outcome.error_text else ""
    step, again = outcome.steps, ""
    if outcome.errors_caught:
        step = outcome.error_step
        again = f" The script caught it and went on, {outcome.errors_caught:,} times in all."
    return Verdict(
        Status.FOUND,
        reason or f"Line {outcome.error_line} raised {outcome.error_type}: {text}{again}",
        module=outcome.error_module or None,
        phase="forward" if outcome.error_module else None,
        step=step,
        line=outcome.error_line,
        evidence=(
            Measurement(outcome.error_type, text, run=BASELINE, step=step),
            Measurement(
                "fp32 control raises", str(bool(evidence.fp32 and evidence.fp32.has_exception))
            ),
        ),
        fix=fix,
    )


def op_verdict(
    root: RootOp, reason: str, fix: Fix, extra: tuple[Measurement, ...] = (), run: str = BASELINE
) -> Verdict:
    """A found verdict about one op, which was seen in ``run``."""
    op = root.op
    library = f" The op itself stands at {op.library}." if op.library else ""
    values = magnitudes(op, run)
    if root.arrives is Arrives.NOWHERE and op.lost is not None:
        reason += (
            f" No NaN shows: {op.lost_at} makes a finite number of the infinity, and its result is"
            f" off by {op.lost:.0%} of fp32's."
        )
        if not op.grad_enabled:
            reason += " No gradients are kept there: an evaluation or a target takes that number."
        error = Measurement("relative error behind the infinity", op.lost, INACCURATE_ERROR)
        values = (*values, error)
    return Verdict(
        Status.LATENT if root.is_latent else Status.FOUND,
        reason + library,
        module=op.module or None,
        op=op.op,
        phase=op.phase,
        step=op.step,
        line=op.line,
        code=op.code,
        evidence=(*values, *extra),
        fix=fix,
    )


def place(op: BadOp) -> str:
    """Where, for a sentence."""
    module = f"module {op.module!r} ({op.module_type})" if op.module else op.module_type
    module = module or "the script itself"
    return f"{module}, line {op.line}" if op.line else module


def sample(op: BadOp) -> str:
    """Where in the batch, for a sentence; "" where the result has lost it, as a sum has. The first
    dimension counts samples in nearly every model, and in CTC's losses always."""
    if not op.index or op.phase == "backward":
        return ""
    if op.op.endswith("_ctc_loss"):
        return f", sample {op.index[0]} of the batch"
    is_row = any(o.shape and op.index[0] < o.shape[0] for o in op.inputs)
    return f" (first at index {op.index[0]} of the first dimension)" if is_row else ""


def replaced_words(run: RunView) -> str:
    """That the script replaced gradients that were not finite; "" where it did not."""
    if not run.replaced_steps:
        return ""
    line = next((c.line for c in run.replaced_gradients if c.line), "")
    at = f" at {line}" if line else ""
    return (
        f"The script replaces gradients that are not finite{at}: at {len(run.replaced_steps):,} of "
        f"{len(run.steps):,} steps, so neither a loss scaler nor the optimizer saw them."
    )


def magnitudes(op: BadOp, run: str = BASELINE) -> tuple[Measurement, ...]:
    """What went in, and what fp32 would have given."""
    found = [
        Measurement(f"largest magnitude of input {n}", operand.max_abs, run=run, step=op.step)
        for n, operand in enumerate(op.inputs, start=1)
        if operand.max_abs is not None
    ]
    limit = FORMATS[op.dtype].max if op.dtype in FORMATS else FP16_MAX
    if op.fp32_max is not None:
        found.append(Measurement("same op in fp32", op.fp32_max, limit, run, op.step))
    found.append(Measurement("infinities", op.pos_inf + op.neg_inf, 0, run, op.step))
    found.append(Measurement("NaN", op.nan, 0, run, op.step))
    return tuple(found)


def island(op: BadOp, kind: str, text: str, patch: str = "") -> Fix:
    """A fix that computes the op's module, or else its line, in fp32."""
    controls: list[str] = []
    if op.module:
        controls.append(Control.of(fp32_modules=op.module))
    if op.line:
        controls.append(Control.of(fp32_lines=op.line))
    return Fix(kind, text, patch or island_patch(op.module), tuple(controls))


ISLAND = """import torch


def in_fp32(module):
    \"\"\"From now on compute this module in fp32, with autocast off.\"\"\"
    forward = module.forward

    def wide(value):
        return value.float() if torch.is_tensor(value) and value.is_floating_point() else value

    def forward_in_fp32(*args, **kwargs):
        device = next(v.device.type for v in (*args, *kwargs.values()) if torch.is_tensor(v))
        with torch.autocast(device, enabled=False):
            return forward(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()})

    module.forward = forward_in_fp32


for name in NAMES:
    in_fp32(model.get_submodule(name))
"""


def island_patch(*modules: str) -> str:
    """Plain PyTorch that keeps ``modules`` in fp32 under autocast, to be pasted behind the place
    where ``model`` is made; without a module, the form of it for an expression."""
    if not any(modules):
        return (
            "with torch.autocast(x.device.type, enabled=False):\n"
            "    ...  # this expression, with its inputs as x.float()\n"
        )
    return ISLAND.replace("NAMES", repr(list(modules)))
