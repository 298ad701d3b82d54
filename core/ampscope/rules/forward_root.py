"""The root op of a forward failure, if it belongs to a class: shared by the forward rules."""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.overflow_class import ForwardClass, forward_class
from ampscope.analysis.root_op import Arrives, RootOp, silent_suspects
from ampscope.analysis.scale_facts import scaled_by_hand
from ampscope.analysis.symptoms import Symptom
from ampscope.observations import BadOp
from ampscope.rules.verdict import Verdict, inconclusive, not_applicable, passed

HARM = frozenset(Symptom) - {Symptom.DIVERGED}


def forward_root(evidence: Evidence, wanted: ForwardClass) -> RootOp | Verdict:
    """The root when it is a forward op of class ``wanted`` that did harm in half precision only;
    else the verdict that says why not."""
    if not evidence.uses_half:
        return not_applicable("The script computes nothing in half precision.")
    root = evidence.root
    if not evidence.symptoms & HARM:
        return passed("Nothing went wrong that such an op could explain.")
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
    use, root = evidence.as_is.use("undecorated_function"), evidence.root
    if use is None or root is None or not evidence.symptoms or evidence.fp32_fails:
        return ""
    inside = root.op.function or root.op.node.removesuffix("Backward")
    return use.op if inside == use.op else ""


def _judged(evidence: Evidence, root: RootOp, wanted: ForwardClass) -> RootOp | Verdict:
    if forward_class(root.op) is not wanted:
        return passed(f"The root is {root.op.op}, which is of another kind.")
    if root.arrives is Arrives.GRADIENT and "where" in root.op.consumers:
        return passed("The infinite branch was discarded; only its gradient came back.")
    if evidence.fp32 is None:
        return inconclusive("Without the fp32 control AMP may be innocent.")
    if same_in_fp32(evidence, root.op):
        return passed("fp32 has the same non-finite value at the same line.")
    if evidence.fp32_fails_first:
        return inconclusive("fp32 fails as early as half precision does.")
    return root


def _silent(evidence: Evidence, wanted: ForwardClass) -> RootOp | Verdict:
    """An infinity that arrives nowhere counts when learning suffers."""
    if not evidence.symptoms & {Symptom.BEHIND, Symptom.FROZEN}:
        return passed("No op of this kind made a non-finite value that mattered.")
    for op in silent_suspects(evidence.as_is):
        if forward_class(op) is wanted and not same_in_fp32(evidence, op):
            return RootOp(op, Arrives.NOWHERE)
    return passed("No op of this kind overflows in most steps.")


def _family(op: BadOp) -> str:
    return op.op.rstrip("_")
