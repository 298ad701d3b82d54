"""Training diverges, and AMP has nothing to do with it.

What it detects
    The fp32 control grows without bound or ends in NaN, no later than the baseline run, and its
    data do not explain it; or its loss ends finite, far above its start, after steps that were too
    long for their gradients. A formula that no precision computes, such as the logarithm of zero,
    counts where fp32 fails at the same op and step. Where no rule explains the symptoms and the
    fp32 and bf16 controls both break no later than the baseline run, no precision computes it.

Why it matters
    AMP can even hide it: with a learning rate that takes fp32 to NaN, GradScaler skips nearly
    every step.

Blind spots
    A control that diverges for a reason of its own. A loss whose value grows with its task (returns
    of a better policy, a curriculum) is no divergence: its steps expect less than four times of it.
    Nor are batches whose loss is not finite where the script leaves them out and steps follow.

Remedy
    A lower learning rate, warm-up, or clipping; for recurrences a gate or a normalisation.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Sequence

from ampscope.analysis.control_losses import (
    EARLY,
    divergence,
    first_grown,
    growth,
    lower_rates,
    rate_may_matter,
)
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives, RootOp, root_op
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scale_facts import undivided_by_hand
from ampscope.analysis.singular import (
    VARIANCES,
    breaks_at_a_point,
    is_singular,
    shared_singularity,
)
from ampscope.analysis.symptoms import Symptom, goes_on, symptoms
from ampscope.control import BASELINE, Control
from ampscope.observations import BadOp
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    inconclusive,
    magnitudes,
    op_verdict,
    passed,
    place,
    sample,
)

GROWTH = 10.0  # the loss, or the gradients, grew tenfold before they broke
BROKEN = frozenset({Symptom.LOSS, Symptom.WEIGHTS, Symptom.DIVERGED, Symptom.GRADIENTS})
NEAR = 2  # steps by which half precision, whose range is smaller, may break before fp32


def check(evidence: Evidence) -> Verdict:
    """Found when fp32 diverges by growth and not by one bad value."""
    fp32 = evidence.fp32
    if fp32 is None:
        return inconclusive("Without the fp32 control this is unknown.")
    if not evidence.fp32_symptoms & BROKEN:
        return passed("fp32 trains: whatever is wrong has to do with precision.")
    op = shared_singularity(evidence)
    in_the_model = op is not None and (op.tracked or bool(op.module_type))
    if op is not None and op.step == fp32.first_bad_step and in_the_model:
        return _formula(op)
    if _recovers(evidence, fp32):
        return passed(
            "In fp32 the script leaves out such batches, too, and trains on: no divergence."
        )
    if (point := breaks_at_a_point(fp32)) is not None:
        return passed(
            f"In fp32 the loss is finite at step {point.step}, and {point.op} at line {point.line} "
            "alone breaks the gradients: no growth leads there."
        )
    grown, rise = growth(fp32), divergence(fp32, None)
    if grown < GROWTH and rise is None:
        return inconclusive("fp32 fails, but not by growing; look at the other findings.")
    bad = fp32.first_bad_step
    own = min(evidence.baseline.bad_loss_steps, default=None)
    if own is not None and bad not in EARLY and growth(fp32, own) < GROWTH:
        return passed(f"Half precision breaks at step {own}, before fp32 has grown.")
    return _diverges(evidence, fp32, grown, rise)


def _diverges(evidence: Evidence, fp32: RunView, grown: float, rise: float | None) -> Verdict:
    """Found: ``grown`` is the growth of fp32's loss or gradients, ``rise`` its last loss over its
    first where that is a divergence."""
    bad, began = fp32.first_bad_step, first_grown(fp32, GROWTH)
    until = bad if bad is not None else began
    module, where = _where(fp32)
    factor = undivided_by_hand(evidence.baseline)
    reason = "AMP is innocent: the fp32 control diverges too"
    reason += f", at step {bad}" if bad is not None else ""
    reason += f". Its loss or gradients grew by a factor of {grown:.3g}; {_rate(fp32, until)}."
    if rise is not None:
        reason += f" The loss ends at {rise:.3g} times its start."
    if began is not None:
        reason += f" It has grown {GROWTH:g}-fold at step {began} for the first time."
    return Verdict(
        Status.FOUND,
        reason + where + ("" if factor is None else _undivided(factor)),
        module=module or None,
        step=until,
        evidence=(
            Measurement("growth of loss or gradient norm in fp32", grown, GROWTH, "fp32", bad),
            Measurement("skipped baseline steps", len(evidence.baseline.skips), None, BASELINE),
        ),
        fix=_lower(lower_rates(fp32, until), factor),
    )


def _lower(rates: Sequence[float], factor: float | None) -> Fix:
    """Of the learning rate; first of what multiplies the gradients and is not divided out."""
    controls = tuple(Control.of(lr=times) for times in rates)
    if factor is None:
        text = "Lower the learning rate, or warm it up; clip the gradients."
        return Fix("lower_lr", text, PATCH.format(times=f"{rates[0]:g}"), controls)
    return Fix(
        "lower_lr",
        f"Divide the gradients by {factor:,.6g} before the step; or lower the learning rate by as "
        "much.",
        DIVISION_PATCH.format(factor=f"{factor:.12g}"),
        (Control.of(lr=1 / factor), *controls),
    )


def _rate(run: RunView, until: int | None) -> str:
    """The learning rate of the steps up to ``until``; of a schedule, which may begin or end at 0,
    the highest."""
    seen = [a.lr for a in run.steps if until is None or a.step <= until]
    rates = [lr for lr in seen if math.isfinite(lr)]
    if not rates:
        return "the learning rate is not known"
    rises = "up to " if min(rates) < max(rates) else ""
    return f"the learning rate is {rises}{max(rates):g}"


def _recovers(evidence: Evidence, fp32: RunView) -> bool:
    """All that is wrong with fp32 are losses that are not finite, and the script left each of
    their batches out and went on: no loss of a step is bad. A divergence does not heal."""
    taken = all(a.loss is None or math.isfinite(a.loss) for a in fp32.steps)
    return evidence.fp32_symptoms & BROKEN == {Symptom.LOSS} and taken and goes_on(fp32)


def _where(fp32: RunView) -> tuple[str, str]:
    """Module in which the fp32 control leaves its range first, "" where the records do not tell,
    and a sentence on it: of the first op that made a value that is not finite; else of the first
    such gradients; else of the weights that moved most of all."""
    root = root_op(fp32)
    if root is not None:
        op = root.op
        said = f"In fp32 {op.op} gives the first value that is not finite ({place(op)})"
        return op.module, f" {said}, at step {op.step}."
    bad = [g for g in fp32.gradients if g.nonfinite]
    if bad:
        first = min(bad, key=lambda g: (g.step, g.order))
        others = sum(g.step == first.step for g in bad) - 1
        more = f" (and of {others:,} more)" if others else ""
        said = f"In fp32 the gradient of {first.name}{more} is the first that is not finite"
        return first.name.rpartition(".")[0], f" {said}, at step {first.step}."
    ends = [s for s in fp32.scans_of("end", "parameter") if s.nan + s.inf == 0 and s.change]
    farthest = max(ends, key=lambda s: s.change or 0.0, default=None)
    if farthest is not None and (farthest.change or 0.0) > GROWTH:
        name, own = farthest.name, farthest.change or 0.0
        said = f"In fp32 {name} moves farthest, by {own:.3g} times its first norm"
        return name.rpartition(".")[0], f" {said}."
    return "", " No record of the fp32 control tells in which module it begins."


def no_precision_trains(evidence: Evidence) -> Verdict:
    """Found where fp32 and bf16 break as early as the baseline run, although nothing grew before:
    at the very first step there is nothing to have grown from."""
    fp32, bf16 = evidence.fp32, evidence.bf16
    if fp32 is None or not evidence.fp32_symptoms & BROKEN:
        return check(evidence)
    if bf16 is None or not symptoms(bf16, None) & BROKEN:
        return inconclusive("fp32 fails, but not by growing; look at the other findings.")
    own, bad = evidence.baseline.first_bad_step, fp32.first_bad_step
    if bad is None or (own is not None and bad > own + NEAR):
        return inconclusive("fp32 fails later than the baseline run does.")
    root = root_op(fp32)
    op = root.op if root is not None else None
    if op is not None and op.phase == "forward" and is_singular(op):
        return _formula(op, "fp32")
    lower = lower_rates(fp32, bad)
    where = "" if op is None else f" There {op.op} gives the first non-finite value ({place(op)})."
    return Verdict(
        Status.FOUND,
        f"AMP is innocent: the fp32 and bf16 controls fail too, in fp32 at step {bad}.{where}",
        module=(op.module or None) if op else None,
        op=op.op if op else None,
        phase=op.phase if op else None,
        step=bad,
        line=op.line if op else "",
        code=op.code if op else "",
        evidence=(
            Measurement("first step that is not finite in fp32", bad, None, "fp32", bad),
            *(magnitudes(op, "fp32") if op else ()),
        ),
        fix=Fix(
            "lower_lr",
            "Lower the learning rate and bound what grows: normalise, gate or clip."
            if bad
            else "Bound what grows within the first step: smaller initial weights, a normalisation "
            "or a gate.",
            PATCH.format(times=f"{lower[0]:g}"),
            tuple(Control.of(lr=times) for times in lower) if rate_may_matter(fp32, bad) else (),
        ),
    )


def _undivided(factor: float) -> str:
    return (
        f" The script multiplies the loss by {factor:,.6g} before backward and does not divide the "
        f"gradients before the step, so each step is {factor:,.6g} times as long as the loss and "
        "the learning rate say."
    )


def _formula(op: BadOp, run: str = BASELINE) -> Verdict:
    """Not a matter of growth: the script asks for a value that does not exist. ``op``: of the
    baseline, and the fp32 control fails at it as well; or of the control alone, ``run``."""
    name = op.op.rpartition(".")[2].rstrip("_")
    meets = f"{op.op} meets an input of exactly zero, or outside its domain,"
    text, patch = "Keep the input away from zero: a clamp or an epsilon.", FORMULA_PATCH
    if name in VARIANCES:
        meets = f"{op.op} of a single element divides by n - 1 = 0,"
        text = "Give it more than one element, or correction=0, which divides by their number."
        patch = "spread = x.std(dim, correction=0)\n"
    elif name in _DOMAINS:
        domain, kept = _DOMAINS[name]
        arguments = _arguments_of(op.code, name)
        named = " or ".join(arguments) or "its argument"
        meets = f"{op.op} takes a number {domain}, and {named} is none,"
        text = f"Keep {named} {domain}: a clamp or an epsilon."
        patch = "".join(f"{kept.format(a)}  # in place of {a}\n" for a in arguments or ["argument"])
    elif name.startswith("div") or (name == "reciprocal" and divisors_of(op.code)):
        divisors = divisors_of(op.code)
        named = " or ".join(divisors)
        # Of several divisions in one line it is not known which one ran.
        divisor = named if len(divisors) == 1 else f"a divisor ({named})" if named else "a divisor"
        zero = "0 / 0" if op.nan else "a division by zero"
        meets = f"{op.op} computes {zero} of finite numbers: {divisor} is 0,"
        text = f"Keep {divisor} away from zero, or leave the division out where it is 0."
        if divisors:
            divisor_input = op.inputs[0 if name == "reciprocal" else 1 :]
            is_number = not divisor_input or divisor_input[0].shape == ()
            # Nothing but an exact zero is changed.
            kept = "({0} or 1)" if is_number else "torch.where({0} == 0, 1, {0})"
            patch = "".join(f"{kept.format(d)}  # in place of {d}\n" for d in divisors)
    fails = "in the fp32 control, which fails too."
    extra: tuple[Measurement, ...] = ()
    if run == BASELINE:
        fails = "and fp32 fails at the same op and step."
        shared = "fp32 fails at the same op and step"
        extra = (Measurement(shared, "True", run="fp32", step=op.step),)
    return op_verdict(
        RootOp(op, Arrives.LOSS),
        f"AMP is innocent: line {op.line} asks for a value that no precision computes at step"
        f" {op.step}{sample(op)}. {meets} {fails}",
        Fix("rewrite_op", text, patch),
        extra,
        run,
    )


# Functions of one argument: where they are defined, and what keeps the argument there.
_ABOVE_0 = ("above 0", "torch.clamp({0}, min=1e-6)")
_DOMAINS = {
    "log": _ABOVE_0,
    "log2": _ABOVE_0,
    "log10": _ABOVE_0,
    "rsqrt": _ABOVE_0,
    "log1p": ("above -1", "torch.clamp({0}, min=-1 + 1e-6)"),
    "logit": ("between 0 and 1", "torch.clamp({0}, 1e-6, 1 - 1e-6)"),
    "atanh": ("between -1 and 1", "torch.clamp({0}, -1 + 1e-6, 1 - 1e-6)"),
}


def _arguments_of(code: str, name: str) -> list[str]:
    """What a line of the script calls the function ``name`` with, as ``torch.log(x)`` or as
    ``x.log()``, each once; [] where the line does not show it."""
    found: list[ast.expr] = []
    for node in _nodes(code):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        called = getattr(function, "attr", getattr(function, "id", ""))
        if called.rstrip("_") != name:
            continue
        given = node.args[:1] or [k.value for k in node.keywords if k.arg == "input"]
        if not given and isinstance(function, ast.Attribute):
            given = [function.value]
        found += given
    return list(dict.fromkeys(map(ast.unparse, found)))


_DIVIDING = frozenset(("div", "div_", "divide", "divide_", "true_divide", "true_divide_"))


def divisors_of(code: str) -> list[str]:
    """What a line of the script divides by, each once; [] where it cannot be read alone."""
    found: list[ast.expr] = []
    for node in _nodes(code):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found.append(node.right)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            found.append(node.value)
        elif isinstance(node, ast.Call) and _divides(node.func):
            found += [k.value for k in node.keywords if k.arg == "other"] or node.args[-1:]
    varying = (node for node in found if not isinstance(node, ast.Constant) or not node.value)
    return list(dict.fromkeys(map(ast.unparse, varying)))


def _nodes(code: str) -> Iterable[ast.AST]:
    """Of a line of the script; none where it cannot be read alone."""
    try:
        return ast.walk(ast.parse(f"{code} pass" if code.endswith(":") else code))
    except (SyntaxError, ValueError, RecursionError):
        return ()


def _divides(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in _DIVIDING


FORMULA_PATCH = "safe = argument.clamp(min=1e-6)  # or: skip the update where it is zero\n"
DIVISION_PATCH = """for parameter in model.parameters():  # after backward, before optimizer.step()
    if parameter.grad is not None:
        parameter.grad.div_({factor})
"""
PATCH = 'for group in optimizer.param_groups:\n    group["lr"] *= {times}\n'


RULE = Rule(
    code="AMP029",
    id="not_amp_divergence",
    title="Divergence that has nothing to do with AMP",
    definition="The fp32 control diverges too: learning rate too high, or an exploding recurrence.",
    check=check,
    last_resort=no_precision_trains,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=40,
    explains=(
        "loss_scale_too_high",
        "loss_magnitude_overflow",
        "activation_overflow",
        "elementwise_overflow",
        "reduction_overflow",
        "gradient_underflow",
        "attention_logit_overflow",
        "singular_gradient",
    ),
    must_cure_fp32=True,
    in_one_step=False,
)
