"""A long sum in half precision stalls.

What it detects
    A half-precision sum, gradient of repeated indices or running total that stays as it is
    although its terms are not zero, or that is far from the fp32 result of the same inputs.

Why it matters
    fp16 stops counting at 2,048 and bf16 at 256; what is added after that is lost.

Blind spots
    Sums in code that does not go through torch.

Remedy
    Accumulate in fp32.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.observations import BadOp
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, passed
from ampscope.rules.wording import island, magnitudes, place

STALLS = 8  # times that the same line added without effect: not a coincidence


def check(evidence: Evidence) -> Verdict:
    """Found from stalled additions and from results far from fp32's, at the op itself."""
    run = evidence.as_is
    coarse = [b for b in run.bad_ops if b.kind == "coarse"]
    drifts = [
        b for b in run.bad_ops if b.kind == "drift" and not any(o.is_parameter for o in b.inputs)
    ]
    stalls = [
        b
        for b in run.bad_ops
        if b.kind == "stall"
        and b.count >= STALLS
        and _own_sum(b)
        and not any(o.is_parameter for o in b.inputs)
    ]
    found = (
        sorted(coarse, key=lambda b: -(b.error or 0.0))
        or sorted(drifts, key=lambda b: -(b.error or 0.0))
        or sorted(stalls, key=lambda b: -b.count)
    )
    if not found:
        return passed("No sum in half precision stalls.")
    op = found[0]
    if op.kind == "coarse":
        reason = (
            f"{op.op} in {place(op)} is {op.error or 0:.0%} away from the fp32 result of the same"
            " inputs."
        )
        value = Measurement("relative error of the sum", op.error or 0.0, 0.05, "as_is", op.attempt)
    elif op.kind == "drift":
        reason = (
            f"The running sum at line {op.line} has lost {op.error or 0:.0%} of its value to"
            f" rounding in {op.dtype}: its terms are smaller than half the spacing of the total."
        )
        value = Measurement(
            "rounding errors over the total", op.error or 0.0, 0.05, "as_is", op.attempt
        )
    else:
        reason = (
            f"The sum at line {op.line} did not change in {op.count} additions of something that is"
            " not zero."
        )
        value = Measurement("additions without effect", op.count, STALLS, "as_is", op.attempt)
    return Verdict(
        Status.FOUND,
        reason,
        module=op.module or None,
        op=op.op,
        phase=op.phase,
        step=op.attempt,
        line=op.line,
        code=op.code,
        evidence=(value, *magnitudes(op)),
        fix=Fix(
            "rewrite_op",
            "Accumulate in fp32.",
            "total = torch.zeros((), dtype=torch.float32)\n",
            island(op, "", "").controls,
        ),
    )


def _own_sum(op: BadOp) -> bool:
    """The first term is what the same op made before: a running total, not a residual."""
    name = op.op.rpartition(".")[2]
    return name.endswith("_") or bool(op.inputs and name in op.inputs[0].producers[:3])


RULE = Rule(
    "half_accumulation_stagnation",
    check,
    ("as_is",),
    37,
    explains=("small_update_lost", "gradient_underflow"),
)
