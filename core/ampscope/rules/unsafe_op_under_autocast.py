"""An op that autocast forbids, or a custom Function that ignores autocast.

What it detects
    binary_cross_entropy under autocast (CUDA raises, a CPU does not); an exception about mixed
    dtypes, or the first non-finite value, inside an autograd.Function without custom_fwd.

Why it matters
    Inside a Function autocast is not what it seems: the backward pass runs without it.

Blind spots
    A Function that is wrong in every precision cannot be told from an AMP fault when fp32 fails as
    well.

Remedy
    binary_cross_entropy_with_logits; or torch.amp.custom_fwd(cast_inputs=torch.float32) and
    custom_bwd.
"""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.evidence import Evidence
from ampscope.control import BASELINE
from ampscope.rules.roots import undecorated_function
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    error_verdict,
    op_verdict,
    passed,
)

_DTYPE_TEXTS = (
    "same dtype",
    "expected scalar type",
    "must have the same dtype",
    "Found dtype",
    "unsafe to autocast",
    "expected m1 and m2 to have",
    "returned an invalid gradient",
)


def check(evidence: Evidence) -> Verdict:
    """Found by a use that CUDA bans, by an exception, or by a root inside a custom Function."""
    run, text = evidence.baseline, evidence.baseline.outcome.error_text
    function = run.use("undecorated_function")
    if "unsafe to autocast" in text:
        return error_verdict(evidence, BCE)
    if function is not None and any(part in text for part in _DTYPE_TEXTS):
        verdict = error_verdict(evidence, DECORATE)
        # In the backward pass no module runs: the Function's own is to blame.
        return replace(verdict, module=verdict.module or function.module or None)
    use = run.use("bce_under_autocast")
    if use is not None:
        return Verdict(
            Status.FOUND,
            f"Line {use.line} computes binary_cross_entropy under autocast. CUDA raises an error"
            " there; a CPU runs it in fp32.",
            module=use.module or None,
            op="aten.binary_cross_entropy",
            phase="forward",
            step=use.step,
            line=use.line,
            evidence=(Measurement("calls under autocast", use.count, 0, BASELINE, use.step),),
            fix=BCE,
        )
    root, name = evidence.root, undecorated_function(evidence)
    if root is not None and name:
        reason = f"The first non-finite value was born inside {name}, which has no custom_fwd."
        return op_verdict(root, reason, DECORATE)
    return passed("No op that autocast forbids.")


BCE = Fix(
    "rewrite_op",
    "Use binary_cross_entropy_with_logits, which autocast runs in fp32.",
    "loss = F.binary_cross_entropy_with_logits(logits, target)  # without the sigmoid\n",
)
DECORATE = Fix(
    "rewrite_op",
    "Decorate the Function so that it runs in fp32, forward and backward.",
    "@staticmethod\n@torch.amp.custom_fwd(device_type=device_type, cast_inputs=torch.float32)\n"
    "def forward(ctx, x): ...\n\n@staticmethod\n@torch.amp.custom_bwd(device_type=device_type)\n"
    "def backward(ctx, grad): ...\n",
)


RULE = Rule(
    code="AMP011",
    id="unsafe_op_under_autocast",
    title="An op that autocast forbids",
    definition="An op that is banned under autocast, or a custom Function without custom_fwd and "
    "custom_bwd.",
    check=check,
    needs=(BASELINE,),
    order=12,
)
