"""The trained parameters are fp16, which GradScaler refuses.

What it detects
    GradScaler's exception 'Attempting to unscale FP16 gradients'; the line that cast the module,
    where it was cast as a whole.

Why it matters
    Gradients of fp16 parameters have lost what the scaler would save; the update is lost as
    well.

Blind spots
    bf16 parameters raise nothing.

Remedy
    Keep the parameters in fp32 and let autocast choose the compute precision.
"""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.evidence import Evidence
from ampscope.control import BASELINE
from ampscope.observations import Call
from ampscope.rules.verdict import Fix, Rule, Verdict, error_verdict, passed


def check(evidence: Evidence) -> Verdict:
    """Found by the text of the exception."""
    if "unscale FP16 gradients" not in evidence.baseline.outcome.error_text:
        return passed("GradScaler did not refuse the gradients.")
    found = error_verdict(evidence, Fix("fp32_params", TEXT, PATCH, ("fp32_params",)))
    cast = next((c.line for c in evidence.baseline.calls if _is_to_fp16(c)), "")
    if not cast:
        return found
    return replace(found, line=cast, reason=f"{found.reason} Line {cast} casts them to fp16.")


def _is_to_fp16(call: Call) -> bool:
    return call.name == "cast" and call.dtype == "fp16"


TEXT = "Remove .half() from the model; autocast casts where it pays."
PATCH = """model = model.float()  # no .half()
with torch.autocast(device_type, dtype=torch.float16):
    loss = ...
"""


RULE = Rule(
    code="AMP022",
    id="fp16_params_with_scaler",
    title="Half-precision parameters with a GradScaler",
    definition="Trainable parameters are fp16, whose gradients GradScaler refuses to unscale.",
    check=check,
    needs=(BASELINE,),
    order=10,
)
