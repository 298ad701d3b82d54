"""Evidence: all runs of one script, and the views that several rules share. Where to look when no
rule names a cause (:class:`Lead`), and values that no precision computes (:func:`is_singular`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ampscope.analysis.root_op import (
    DIVISIONS,
    LOGARITHMS,
    Arrives,
    ForwardClass,
    RootOp,
    forward_class,
    root_op,
)
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms, symptoms_of_control
from ampscope.observations import BadOp


class Evidence:
    """What the rules may look at; ``runs`` maps a control's word to its run, as_is among them.
    ``emulates_bf16``: the GPU has no bf16 instructions, so bf16 is evidence, and no fix."""

    def __init__(
        self, runs: Mapping[str, RunView], policy: str, *, emulates_bf16: bool = False
    ) -> None:
        self.runs = dict(runs)
        self.policy = policy
        self.emulates_bf16 = emulates_bf16

    @property
    def baseline(self) -> RunView:
        """The baseline: the unchanged script. Every diagnosis has this run."""
        return self.runs["as_is"]

    @property
    def framework(self) -> str:
        """torch, keras or paddle; without torch's op trace some causes cannot be judged."""
        return self.baseline.outcome.framework

    @property
    def fp32(self) -> RunView | None:
        """The fp32 control; None when it was not run."""
        return self.runs.get("fp32")

    @property
    def bf16(self) -> RunView | None:
        """The bf16 control; None when it was not run."""
        return self.runs.get("bf16")

    @cached_property
    def symptoms(self) -> frozenset[Symptom]:
        """What is wrong with the baseline run."""
        return symptoms(self.baseline, self.fp32)

    @cached_property
    def fp32_symptoms(self) -> frozenset[Symptom]:
        """What is wrong with the fp32 control by itself; nothing when it was not run."""
        if self.fp32 is None:
            return frozenset()
        found = symptoms_of_control(self.fp32, self.baseline)
        # A lack of memory says nothing of the training.
        return found - {Symptom.EXCEPTION} if self.fp32.outcome.is_out_of_memory else found

    @cached_property
    def fp32_fails(self) -> bool:
        """The fp32 control has non-finite numbers, raises or diverges: AMP may be innocent. An
        error that the baseline run does not meet is the control's own: it acquits no precision."""
        raised_alone = {Symptom.EXCEPTION} - self.symptoms
        return bool(self.fp32_symptoms - raised_alone)

    @cached_property
    def fp32_fails_first(self) -> bool:
        """fp32 goes wrong at the same step as the baseline run, or earlier."""
        if self.fp32 is None or not self.fp32_fails:
            return False
        own, reference = self.baseline.first_bad_step, self.fp32.first_bad_step
        return reference is not None and (own is None or reference <= own)

    @property
    def has_the_range_of_fp32(self) -> bool:
        """bf16 is the only half format that the script was seen to use, and nothing runs in fp16
        unasked: cuDNN's recurrent layers do under bf16 autocast."""
        outcome = self.baseline.outcome
        named = f"{outcome.uses_autocast}+{outcome.uses_half_model}".split("+")
        formats = {*named, *outcome.flop_dtypes} & {"fp16", "bf16"}
        return formats == {"bf16"} and "rnn" not in outcome.gaps

    @cached_property
    def uses_half(self) -> bool:
        """The script computes in half precision at all: under autocast, in a model of it, or in
        ops on tensors that it casts itself."""
        outcome = self.baseline.outcome
        in_half = outcome.half_ops or {"fp16", "bf16"} & {*outcome.flop_dtypes}
        return bool(outcome.uses_autocast or outcome.uses_half_model or in_half)

    @cached_property
    def root(self) -> RootOp | None:
        """The op to which the non-finite loss, gradient or evaluation goes back."""
        return root_op(self.baseline)

    @cached_property
    def lost_share(self) -> float | None:
        """Gradient entries that are zero here and not in fp32, as a share of all."""
        if self.fp32 is None:
            return None
        own, reference = self.baseline.zero_share, self.fp32.zero_share
        return None if own is None or reference is None else own - reference


# Where to look when no rule names a cause: the first bad op, else the first bad step.
#
#     Lead("aten.addmm gave the first non-finite value", "addmm", "blocks.1", "train.py:18", 3)


APART = 0.1  # of fp32's loss; mini-batch losses of the same weights and batch differ by rounding
_KINDS = {
    "nonfinite": "gave the first non-finite value out of finite inputs",
    "stall": "left its first term as it was, although the other one is not zero",
    "coarse": "is far from its fp32 result on the same inputs",
    "drift": "adds up rounding errors",
}


@dataclass(frozen=True, slots=True)
class Lead:
    """``what`` is a sentence without its place; an empty field is not known."""

    what: str
    op: str = ""
    module: str = ""
    phase: str = ""
    line: str = ""
    code: str = ""
    step: int | None = None


def lead(run: RunView, fp32: RunView | None) -> Lead | None:
    """The best that was recorded: an op, the script's error, a bad step, a loss apart from fp32's.
    None where nothing of the kind was seen."""
    op = _first_op(run)
    if op is not None:
        what = f"{op.op} {_KINDS.get(op.kind, 'was the first bad op')}"
        return Lead(what, op.op, op.module, op.phase, op.line, op.code, op.step)
    outcome = run.outcome
    if outcome.error_type:
        what = f"the script's error is {outcome.error_type}"
        at = outcome.steps if run.has_exception else outcome.error_step
        return Lead(what, module=outcome.error_module, line=outcome.error_line, step=at)
    return _bad_step(run) or _evaluation(run) or _apart(run, fp32)


def _first_op(run: RunView) -> BadOp | None:
    """What the symptom descends from; else the first that gave NaN or Inf while training; else the
    first op that was inaccurate."""
    root = root_op(run)
    if root is not None:
        return root.op
    ops = sorted(run.bad_ops, key=lambda b: (b.step, b.id))
    nonfinite = [b for b in ops if b.kind == "nonfinite"]
    wrong = bool(run.bad_loss_steps or run.bad_gradient_steps or run.weights_broken)
    tracked = [b for b in nonfinite if b.tracked and b.grad_enabled]
    return next(iter([*tracked, *nonfinite] if wrong else [*tracked, *ops]), None)


def _bad_step(run: RunView) -> Lead | None:
    step = run.first_bad_step
    if step is None:
        return None
    if step in run.bad_loss_steps:
        return Lead("the loss is not finite there for the first time", step=step)
    bad = [g for g in run.gradients if g.step == step and g.nonfinite]
    if bad:
        first = min(bad, key=lambda g: g.order)
        what = f"the gradient of {first.name} is not finite there for the first time"
        return Lead(what, module=first.name.rpartition(".")[0], phase="backward", step=step)
    return Lead("gradients or weights are not finite there for the first time", step=step)


def _evaluation(run: RunView) -> Lead | None:
    if not run.outcome.eval_nonfinite:
        return None
    return Lead("a forward pass without gradients gave NaN or Inf", module=run.outcome.eval_module)


def _apart(run: RunView, fp32: RunView | None) -> Lead | None:
    """The first step whose loss is clearly another than fp32's."""
    if fp32 is None:
        return None
    pairs = zip(run.steps, fp32.steps, strict=False)
    for own, other in pairs:
        if own.loss is None or other.loss is None:
            continue
        if abs(own.loss - other.loss) > APART * max(abs(other.loss), 1e-6):
            what = f"the loss is {own.loss:.4g} there, and {other.loss:.4g} in fp32"
            return Lead(what, step=own.step)
    return None


# A value that no precision computes: a division by zero, the logarithm of zero, a loss that is
# infinite by definition. fp32 fails at the same op, line and step, for the same reason.


_IMPOSSIBLE = ("_ctc_loss", "_cudnn_ctc_loss")  # no alignment of the target has a probability
_SINGULAR = DIVISIONS | LOGARITHMS | {"floor_divide", "remainder", "fmod", "atanh", "digamma"}
VARIANCES = frozenset({"std", "var", "std_mean", "var_mean"})
_OWN_RULES = (ForwardClass.EMPTY, ForwardClass.MASKED_ROW, ForwardClass.MASK)


def shared_singularity(evidence: Evidence) -> BadOp | None:
    """The root op of the baseline run, when it is singular and fp32's own, at the same step; of
    fp32 where the baseline run went on."""
    if evidence.fp32 is None or evidence.root is None:
        return None
    op = evidence.root.op
    if evidence.root.arrives is Arrives.GRADIENT and "where" in op.consumers:
        return None  # its value is discarded, and its gradient is not: masked_branch_gradient
    if op.phase == "backward" or forward_class(op) in _OWN_RULES or not is_singular(op):
        return None
    wanted = (op.line, op.phase, op.op.rstrip("_"), op.step)
    for other in evidence.fp32.bad_ops:
        found = (other.line, other.phase, other.op.rstrip("_"), other.step)
        if found == wanted and is_singular(other):
            return op
    return None


def is_impossible_alignment(op: BadOp) -> bool:
    """A CTC loss that is infinite: the input is shorter than its target needs."""
    return op.op.rpartition(".")[2] in _IMPOSSIBLE and op.pos_inf > 0


def is_singular(op: BadOp) -> bool:
    """The op is not defined where its input is: at zero, or beyond the domain of a logarithm."""
    if op.kind != "nonfinite":
        return False
    if is_impossible_alignment(op):
        return True
    name = op.op.rpartition(".")[2]
    if name in VARIANCES:
        # Of finite numbers fp32 gives NaN only where there is one element: n - 1 is 0.
        return op.nan > 0 and op.fp32_finite is False and op.fp32_max is None
    if name not in _SINGULAR:
        return False
    at = 1 if name.startswith(("div", "true_divide", "floor_divide", "remainder", "fmod")) else 0
    if len(op.inputs) <= at:
        return 0.0 in op.scalars
    return op.inputs[at].zeros > 0 or (name in LOGARITHMS and op.nan > 0)
