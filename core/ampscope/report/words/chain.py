"""The chain from the root cause to what a person sees: input, first bad op, loss, skipped step.

Each link is read off the run as it is; a cause that is no op (a clip before unscale_) stands at the
head with its measurements in place of an op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.causes import CAUSES
from ampscope.diagnose import Finding
from ampscope.formats import FORMATS
from ampscope.observations import Attempt, BadOp, Operand
from ampscope.report.words.controls import value
from ampscope.report.words.numbers import plural, share

MAX_INPUTS = 2
MAX_SHAPE = 4


@dataclass(frozen=True, slots=True)
class Link:
    """One box: what happened, with its numbers. ``is_nonfinite``: NaN or Inf is there."""

    title: str
    detail: str
    is_nonfinite: bool = False
    is_root: bool = False
    step: int | None = None


def chain(finding: Finding, run: RunView, symptoms: tuple[str, ...]) -> list[Link]:
    """From cause to symptom, in order."""
    op = bad_op(finding, run)
    links = _op_links(op) if op is not None else [_cause_link(finding)]
    links += [
        Link(CAUSES[c.cause].title, c.verdict.reason, step=c.verdict.step)
        for c in finding.consequences
    ]
    links += _arrival(run, op.attempt if op is not None else finding.verdict.step)
    links.append(Link("What you see", "; ".join(symptoms) or "nothing, in the steps that were run"))
    return links


def bad_op(finding: Finding, run: RunView) -> BadOp | None:
    """The recorded op that the finding names."""
    found = finding.verdict
    return next(
        (
            b
            for b in run.bad_ops
            if (b.op, b.line, b.attempt) == (found.op, found.line, found.step)
            and (b.module or None) == found.module
        ),
        None,
    )


def _op_links(op: BadOp) -> list[Link]:
    inputs = [o for o in op.inputs if o.max_abs is not None] or list(op.inputs)
    links = []
    if inputs:
        detail = "; ".join(_operand(o) for o in inputs[:MAX_INPUTS])
        links.append(Link("Input", detail, any(o.nonfinite for o in inputs), step=op.attempt))
    place = f" in {op.module}" if op.module else ""
    title = f"First bad op: {op.op}{place}, {op.phase}"
    links.append(Link(title, _op_detail(op), op.kind == "nonfinite", True, op.attempt))
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


def _cause_link(finding: Finding) -> Link:
    found = finding.verdict
    measured = "; ".join(f"{m.name} {value(m.value)}" for m in found.evidence[:3])
    place = found.module or found.line
    title = CAUSES[finding.cause].title + (f", {place}" if place else "")
    return Link(title, measured or found.reason, is_root=True, step=found.step)


def _arrival(run: RunView, step: int | None) -> list[Link]:
    """Where the trouble went from ``step`` on: loss, gradients, and the optimizer's step."""
    bad = next((a for a in run.attempts if a.attempt >= (step or 0) and _is_bad(a)), None)
    if bad is None:
        return []
    links = []
    if bad.loss is not None and not math.isfinite(bad.loss):
        links.append(Link("Loss", f"{value(bad.loss)} at step {bad.attempt}", True))
    if bad.grad_nonfinite:
        text = (
            f"{share(bad.grad_nonfinite, bad.grad_total)} entries not finite at step {bad.attempt}"
        )
        links.append(Link("Gradients", text, True, step=bad.attempt))
    if bad.skipped:
        total = plural(len(run.attempts), "step")
        text = f"GradScaler left step {bad.attempt} out; {len(run.skips):,} of {total} in all"
        links.append(Link("Skipped step", text))
    elif bad.weight_nonfinite:
        entries = plural(bad.weight_nonfinite, "entry", "entries")
        links.append(Link("Weights", f"{entries} not finite after step {bad.attempt}", True))
    return links


def _is_bad(attempt: Attempt) -> bool:
    loss = attempt.loss
    is_lost = loss is not None and not math.isfinite(loss)
    return bool(is_lost or attempt.grad_nonfinite or attempt.weight_nonfinite)
