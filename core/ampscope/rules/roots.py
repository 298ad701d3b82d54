"""The root op of a forward failure, if it belongs to a class: shared by the forward rules."""

from __future__ import annotations

import math

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import (
    DIVISIONS,
    Arrives,
    ForwardClass,
    RootOp,
    forward_class,
    silent_suspects,
    swallowed,
)
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scale_facts import scaled_by_hand
from ampscope.analysis.symptoms import LAGS, Symptom, lags, learns_slower
from ampscope.numerics.formats import FORMATS
from ampscope.observations import BadOp
from ampscope.rules.verdict import Verdict, inconclusive, not_applicable, passed

HARM = frozenset(Symptom) - {Symptom.DIVERGED}
LEARNING = frozenset({Symptom.BEHIND, Symptom.FROZEN})
_DOMAINS = frozenset({"sqrt", "rsqrt", "log", "log2", "log10", "pow", "acos", "asin", "log1p"})
LOST_SURELY = 0.5  # of the norm of what the infinity went into
MIN_LOST = 8  # times


def forward_root(evidence: Evidence, wanted: ForwardClass) -> RootOp | Verdict:
    """The root when it is a forward op of class ``wanted`` that did harm in half precision only;
    else the verdict that says why not."""
    if not evidence.uses_half:
        return not_applicable("The script computes nothing in half precision.")
    root = evidence.root
    if not evidence.symptoms & HARM:
        return _silent(evidence, wanted)
    if scaled_by_hand(evidence) is not None:
        return passed("The loss is finite; its product with a loss scale is not.")
    if function := undecorated_function(evidence):
        return passed(f"It was born inside {function}, which ignores autocast.")
    if root is not None and root.op.phase != "backward":
        return _judged(evidence, root, wanted)
    if root is not None and Symptom.SKIPS in evidence.symptoms:
        return passed("The first non-finite value was born in the backward pass.")
    return _silent(evidence, wanted)


def same_in_fp32(evidence: Evidence, op: BadOp) -> bool:
    """Whether the fp32 control had a bad op of the same name at the same line, in the same phase:
    what a norm's backward divides by zero, it replaces itself."""
    fp32 = evidence.fp32
    if fp32 is None:
        return False
    wanted = (op.line, op.phase, _family(op))
    return any((b.line, b.phase, _family(b)) == wanted for b in fp32.bad_ops)


def undecorated_function(evidence: Evidence) -> str:
    """The custom Function without custom_fwd in which the root was born; "" when there is none."""
    use, root = evidence.baseline.use("undecorated_function"), evidence.root
    if use is None or root is None or not evidence.symptoms or evidence.fp32_fails:
        return ""
    inside = root.op.function or root.op.node.removesuffix("Backward")
    return use.op if inside == use.op else ""


def _judged(evidence: Evidence, root: RootOp, wanted: ForwardClass) -> RootOp | Verdict:
    if forward_class(root.op) is not wanted:
        return passed(f"The root is {root.op.op}, which is of another kind.")
    if root.arrives is Arrives.GRADIENT and "where" in root.op.consumers:
        return passed("The infinite branch was discarded; only its gradient came back.")
    if (lost := lost_before(evidence.baseline, root.op)) is not None:
        return passed(f"What went into {root.op.op} was lost before, at {lost.line} ({lost.op}).")
    if evidence.fp32 is None:
        return inconclusive("Without the fp32 control AMP may be innocent.")
    if same_in_fp32(evidence, root.op):
        return passed("fp32 has the same non-finite value at the same line.")
    if evidence.fp32_fails_first:
        return inconclusive("fp32 fails as early as half precision does.")
    return root


def lost_before(run: RunView, op: BadOp) -> BadOp | None:
    """The op without which ``op`` would have stayed finite, though its own result was finite: terms
    that cancelled, where ``op`` has no value for the number left of them; a sum that stagnated,
    where ``op`` divides by it and the true sum is large enough. None where there is none."""
    name = op.op.rpartition(".")[2]
    limit = FORMATS[op.dtype].max if op.dtype in FORMATS else math.inf
    for lost in run.bad_ops:
        if name not in lost.consumers or (lost.step, lost.id) >= (op.step, op.id):
            continue
        if lost.kind == "cancelled" and leaves_domain(op):
            return lost
        too_small = op.fp32_max is not None and op.fp32_max * (1 - (lost.error or 0.0)) <= limit
        if lost.kind in ("coarse", "drift") and name in DIVISIONS and too_small:
            return lost
    return None


def leaves_domain(op: BadOp) -> bool:
    """Whether ``op`` gave NaN and no infinity for finite inputs: there its function has no value,
    as a square root has none of a negative number. Nothing overflowed."""
    name = op.op.rpartition(".")[2]
    return name in _DOMAINS and op.nan > 0 and not (op.pos_inf or op.neg_inf)


def _silent(evidence: Evidence, wanted: ForwardClass) -> RootOp | Verdict:
    """An infinity that arrives nowhere counts when learning suffers."""
    if found := _swallowed(evidence, wanted):
        return found
    if not _suffers(evidence):
        return passed("No op of this kind made a non-finite value that mattered.")
    for op in silent_suspects(evidence.baseline):
        if forward_class(op) is wanted and not same_in_fp32(evidence, op):
            return RootOp(op, Arrives.NOWHERE)
    return passed("No op of this kind overflows in most steps.")


def _swallowed(evidence: Evidence, wanted: ForwardClass) -> RootOp | None:
    """A later op made the infinity finite, with a result unlike fp32's. It is latent while the
    training keeps up with fp32's, unless most of a result that gradients go through is wrong at
    most steps since it began: no look at the losses is needed then. Under no_grad the weights do
    not tell: there it is latent unless most of a result inside a module is wrong, because an
    evaluation or a target is made of it; it explains no symptom of the training. One that is not
    latent comes first."""
    run, fp32 = evidence.baseline, evidence.fp32
    found: list[RootOp] = []
    for op in swallowed(run):
        if forward_class(op) is wanted and not same_in_fp32(evidence, op) and fp32 is not None:
            since = sum(a.step >= op.step for a in run.steps)
            in_most = op.count >= max(MIN_LOST, since // 2)
            in_evaluation = bool(op.module_type) and not evidence.symptoms
            counts = in_most if op.grad_enabled else in_evaluation
            is_sure = counts and (op.lost or 0.0) > LOST_SURELY
            least = LAGS / 2 if in_most else LAGS
            is_latent = not (is_sure or (op.grad_enabled and _suffers(evidence, least)))
            found.append(RootOp(op, Arrives.NOWHERE, is_latent=is_latent))
    return min(found, key=lambda root: root.is_latent, default=None)


def _suffers(evidence: Evidence, least: float = LAGS) -> bool:
    """Whether less is learned than in fp32; by ``least`` of its progress, batch by batch."""
    run, fp32 = evidence.baseline, evidence.fp32
    if evidence.symptoms & LEARNING:
        return True
    return fp32 is not None and (learns_slower(run, fp32) or lags(run, fp32, least))


def _family(op: BadOp) -> str:
    return op.op.rstrip("_")
