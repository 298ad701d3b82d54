"""Running statistics are not finite while the weights are.

What it detects
    NaN or infinity in a buffer at the end, finite weights, and fp32 buffers that are finite. Where
    the op that overflowed is known, it is the cause and this its consequence. Half-precision
    statistics that overflowed out of finite inputs, where more than a quarter of what an evaluation
    makes of them is lost.

Why it matters
    GradScaler protects the weights from a bad forward pass, but BatchNorm has updated its
    statistics by then: training looks healthy and the evaluation is NaN. A variance above 65,504
    is infinity in a BatchNorm that was cast to fp16, and the evaluation divides by it.

Blind spots
    Statistics that went bad and were reset by the script.

Remedy
    Cure the overflow; re-estimate the statistics; keep BatchNorm's inputs in range. Leave BatchNorm
    in fp32 when the model is cast.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.control import BASELINE, Control
from ampscope.observations import OpUse
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, inconclusive, passed


def check(evidence: Evidence) -> Verdict:
    """Found by the scan at the end."""
    run = evidence.baseline
    use = run.use("half_statistics")
    if use is not None:
        return _outgrown(use)
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
            Measurement(f"NaN and infinities in {s.name}", s.nan + s.inf, 0, BASELINE, s.step)
            for s in bad[:5]
        ),
        fix=Fix(
            "fp32_module",
            "Cure the overflow of that step, and re-estimate the statistics.",
            PATCH,
            (Control.of(fp32_modules=module), "bf16"),
        ),
    )


def _outgrown(use: OpUse) -> Verdict:
    """Each step gave finite outputs; the statistics that it updated do not fit the format."""
    where = f"module {use.module!r}" if use.module else "the batch normalisation"
    lost = Measurement(
        "relative error of the evaluation", use.value or 0.0, use.other, BASELINE, use.step
    )
    controls = (Control.of(fp32_modules=use.module),) if use.module else ()
    return Verdict(
        Status.FOUND,
        f"The running statistics of {where} are kept in half precision and have overflowed:"
        f" training does not read them, and the evaluation at line {use.line} normalises with"
        " infinity.",
        module=use.module or None,
        op=f"aten.{use.op}",
        phase="forward",
        step=use.step,
        line=use.line,
        evidence=(lost,),
        fix=Fix(
            "fp32_module",
            "Keep BatchNorm in fp32: cast it back after the model was cast to half precision.",
            IN_FP32,
            (*controls, "bf16"),
        ),
    )


IN_FP32 = """model.half()
for module in model.modules():
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        module.float()  # weights and running statistics; its inputs and outputs stay half
"""


PATCH = """if not torch.isfinite(loss):
    bn.reset_running_stats()  # or restore them from before this forward pass
"""


RULE = Rule(
    code="AMP027",
    id="batchnorm_stats_corrupted",
    title="BatchNorm's running statistics are not finite",
    definition="One bad forward pass poisoned the running statistics, although the weights are "
    "sound.",
    check=check,
    needs=(BASELINE, "fp32"),
    order=58,  # behind the ops whose overflow poisons the statistics
    explains=("loss_scale_too_high",),
    explained_by=(
        "bad_initial_state",
        "bad_input_data",
        "mask_constant_overflow",
        "attention_logit_overflow",
        "log_zero_saturation",
        "norm_eps_underflow",
        "elementwise_overflow",
        "reduction_overflow",
        "activation_overflow",
    ),
)
