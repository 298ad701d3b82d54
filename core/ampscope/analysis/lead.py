"""Where to look when no rule names a cause: the first bad op, else the first bad step.

Lead("aten.addmm gave the first non-finite value", "addmm", "blocks.1", "train.py:18", 3)
"""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.root_op import root_op
from ampscope.analysis.run_view import RunView
from ampscope.observations import BadOp

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
    if (op := _first_op(run)) is not None:
        what = f"{op.op} {_KINDS.get(op.kind, 'was the first bad op')}"
        return Lead(what, op.op, op.module, op.phase, op.line, op.code, op.step)
    outcome = run.outcome
    if outcome.error_type:
        what = f"the script's error is {outcome.error_type}"
        at = outcome.steps if run.has_exception else outcome.error_step
        return Lead(what, module=outcome.error_module, line=outcome.error_line, step=at)
    if (bad := _bad_step(run)) is not None:
        return bad
    if outcome.eval_nonfinite:
        what = "a forward pass without gradients gave NaN or Inf"
        return Lead(what, module=outcome.eval_module)
    return _apart(run, fp32)


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


def _apart(run: RunView, fp32: RunView | None) -> Lead | None:
    """The first step whose loss is clearly another than fp32's."""
    if fp32 is None:
        return None
    for own, other in zip(run.steps, fp32.steps, strict=False):
        if own.loss is None or other.loss is None:
            continue
        if abs(own.loss - other.loss) > APART * max(abs(other.loss), 1e-6):
            what = f"the loss is {own.loss:.4g} there, and {other.loss:.4g} in fp32"
            return Lead(what, step=own.step)
    return None
