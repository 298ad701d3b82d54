"""The root op of a backward failure: born there, or sent back by a discarded branch."""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives, RootOp
from ampscope.analysis.singular import has_no_value
from ampscope.analysis.symptoms import Symptom
from ampscope.observations import BadOp
from ampscope.rules.roots import undecorated_function

SELECTS = frozenset({"where", "masked_fill", "masked_fill_"})
# Functions whose derivative is infinite (or undefined) at zero although they are finite there.
SINGULAR = ("Sqrt", "Norm", "Rsqrt", "Pow", "Atan2", "Cdist", "Pdist", "Acos", "Asin", "Reciprocal",
            "Std", "Hypot", "Div", "Log", "Acosh", "Normalize", "Angle", "Abs")  # fmt: skip
NUMBERS = frozenset(
    {
        Symptom.LOSS,
        Symptom.GRADIENTS,
        Symptom.WEIGHTS,
        Symptom.SKIPS,
        Symptom.EVALUATION,
        Symptom.BEHIND,
    }
)


def backward_root(evidence: Evidence) -> RootOp | None:
    """The earliest bad op that reached a gradient while the loss was finite, if harm was done.

    The fp32 control stands in where the baseline run shows none: one NaN ends an fp32 run, and
    AMP skips it.
    """
    if not (evidence.symptoms | evidence.fp32_symptoms) & NUMBERS:
        return None
    root = evidence.root
    if root is None or root.arrives is not Arrives.GRADIENT or undecorated_function(evidence):
        return None
    return root


def is_discarded_branch(evidence: Evidence, root: RootOp) -> bool:
    """The gradient that came in was zero because ``where`` or a mask had discarded the branch; or
    the op whose gradient it is had given NaN or infinity itself, which never reached the loss. A
    value that fp32 does not have either and that the loss never saw was left out of it somehow,
    by an index for example."""
    op = root.op
    masks = {
        "where",
        "masked_fill",
        "masked_fill_",
        "clamp",
        "clamp_backward",
        "threshold_backward",
    }
    if op.phase != "backward":
        return bool(SELECTS & set(op.consumers)) or has_no_value(op)
    if any(_is_forward_of(b, op) for b in evidence.baseline.bad_ops):
        return True
    from_mask = any(masks & set(o.producers[:3]) and o.zeros for o in op.inputs)
    return from_mask and op.nan > 0


def _is_forward_of(bad: BadOp, op: BadOp) -> bool:
    """Whether ``bad`` made what backward op ``op`` differentiates, and a mask discarded it."""
    name = bad.op.rpartition(".")[2].replace("_", "")
    same_place = (bad.phase, bad.line, bad.module) == ("forward", op.line, op.module)
    is_discarded = not bad.reached_loss and bool(SELECTS & set(bad.consumers))
    return (
        bad.kind == "nonfinite"
        and same_place
        and is_discarded
        and (op.node.lower().startswith(name))
    )


def is_overflow(root: RootOp) -> bool:
    """A backward op whose fp32 result is finite and beyond the format: a matter of scale."""
    op = root.op
    if op.phase != "backward" or op.dtype not in ("fp16", "bf16"):
        return False
    finite_in_fp32 = op.fp32_finite is not False
    divides_by_zero = "div" in op.op and len(op.inputs) > 1 and op.inputs[1].zeros > 0
    return finite_in_fp32 and not op.nan and not divides_by_zero


def remedy(op: BadOp) -> tuple[str, str]:
    """What keeps a function away from where it has no derivative, as a sentence and as a patch: of
    the op that computes it, or in backward of the op's node."""
    name = (op.node or op.op.rpartition(".")[2]).lower()
    found = (rest for names, *rest in _REMEDIES if any(one in name for one in names))
    text, patch = next(found, _AWAY)
    return text, patch


_AWAY = [
    "Keep the argument away from there: an epsilon, or a clamp before.",
    "x = x.clamp(min=1e-6)\n",
]
_REMEDIES = (
    (
        ("xlogy", "kldiv", "kl_div", "entr"),
        "p * log(p) has no finite derivative at p = 0: compute it from logarithms, or keep the "
        "probabilities above 0.",
        "kl = (log_p.exp() * (log_p - log_q)).sum(-1)  # or: p.clamp(min=1e-6)\n",
    ),
    (
        ("log",),
        "Keep the argument of the logarithm above 0: a clamp before.",
        "x = torch.log(x.clamp(min=1e-6))\n",
    ),
    (
        ("svd", "eig", "pinv", "matrixrank"),
        "The derivative divides by differences of singular values or eigenvalues: keep equal ones "
        "apart, or use only what does not need the vectors.",
        "matrix = matrix + 1e-6 * torch.diag(torch.arange(n, dtype=matrix.dtype))\n",
    ),
    (
        ("linalg", "inverse", "cholesky", "solve", "lu_", "det"),
        "Keep the matrix away from a singular one: add a small multiple of the identity, or leave "
        "such samples out before it.",
        "matrix = matrix + 1e-6 * torch.eye(matrix.shape[-1], dtype=matrix.dtype)\n",
    ),
    (
        ("acos", "asin", "atanh", "acosh"),
        "Keep the argument inside its range: a clamp just within it.",
        "angle = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))\n",
    ),
    (
        ("div", "reciprocal"),
        "Keep the divisor away from zero before the division.",
        "quotient = a / torch.where(b == 0, 1, b)\n",
    ),
    (
        ("sqrt", "norm", "pow", "cdist", "std", "hypot", "atan2"),
        "Keep the argument away from zero: an epsilon inside the root.",
        "distance = torch.sqrt(squared + 1e-6)\n",
    ),
)
