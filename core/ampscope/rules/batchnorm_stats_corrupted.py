"""Running statistics are not finite while the weights are.

What it detects
    NaN or infinity in a buffer at the end, finite weights, and fp32 buffers that are finite. Where
    the op that overflowed is known, it is the cause and this its consequence.

Why it matters
    GradScaler protects the weights from a bad forward pass, but BatchNorm has updated its
    statistics by then: training looks healthy and the evaluation is NaN.

Blind spots
    Statistics that went bad and were reset by the script.

Remedy
    Cure the overflow; re-estimate the statistics; keep BatchNorm's inputs in range.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.control import Control
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, inconclusive, passed


def check(evidence: Evidence) -> Verdict:
    """Found by the scan at the end."""
    run = evidence.baseline
    bad = run.broken_buffers
    if not bad:
        return passed("All buffers are finite at the end.")
    if run.weights_broken or any(s.nan + s.inf for s in run.scans_of("end", "parameter")):
        return passed("The weights are not finite either: the buffers are a consequence.")
    if run.steps and len(run.bad_loss_steps) > 0.5 * len(run.steps):
        return passed("Most steps have no finite loss: the buffers are a consequence.")
    if evidence.fp32 is not None and evidence.fp32.broken_buffers:
        return inconclusive("fp32 ends with such buffers too.")
    first = bad[0]
    step = run.first_bad_step
    module = first.name.rpartition(".")[0]
    return Verdict(
        Status.FOUND,
        f"{first.name} holds {first.nan} NaN and {first.inf} infinities at the end, and every"
        f" weight is finite. The forward pass of step {step} did it; the scaler skipped only the"
        " update.",
        module=module or None,
        phase="forward",
        step=step,
        evidence=tuple(
            Measurement(f"NaN and infinities in {s.name}", s.nan + s.inf, 0, "as_is", s.step)
            for s in bad[:5]
        ),
        fix=Fix(
            "fp32_module",
            "Cure the overflow of that step, and re-estimate the statistics.",
            PATCH,
            (Control.of(fp32_modules=module), "bf16"),
        ),
    )


PATCH = """if not torch.isfinite(loss):
    bn.reset_running_stats()  # or restore them from before this forward pass
"""


RULE = Rule(
    "batchnorm_stats_corrupted",
    check,
    ("as_is", "fp32"),
    58,  # behind the ops whose overflow poisons the statistics: it is their consequence
    explains=("loss_scale_too_high",),
)
