"""One piece of evidence for each cause that lies in an op, with the numbers of its public report.

The forward faults make every loss NaN in half precision and leave fp32 sound, but for those whose
definition says otherwise.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.observations import BadOp, HalfSite, OpUse
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    LINE,
    NAN,
    OVERFLOWED,
    STEPS,
    bad_op,
    but,
    evidence,
    fp32_run,
    run,
    steps,
    tensor,
)

WEIGHT = tensor(0.8, is_parameter=True)
FP32_MIN = -3.4028234663852886e38  # torch.finfo(torch.float32).min


def fails_forward(op: BadOp, *in_fp32: BadOp) -> Evidence:
    """Every loss NaN and every step skipped in fp16; fp32 learns whatever op it has."""
    broken = steps((NAN,) * STEPS, **OVERFLOWED)
    return evidence(run(broken, op), fp32_run(None, *in_fp32))


def skips_with_finite_loss(op: BadOp) -> Evidence:
    """Gradients are never finite, losses are; fp32 learns."""
    return evidence(run(steps(FLAT, **OVERFLOWED), op))


# transformers#5651: the second product of T5's feed-forward block gives 66,246.
ACTIVATION = bad_op("aten.addmm", tensor(12.0), tensor(900.0), WEIGHT, fp32_max=66246.0)
# ultralytics#24990: q times k before it is scaled, d = 128.
LOGITS = bad_op(
    "aten.bmm", tensor(280.0), tensor(280.0), fp32_max=98000.0, module="attn",
    consumers=("_unsafe_view", "mul", "add", "_softmax"),
)  # fmt: skip
# torch.where turns a 0-dim fp32 constant into -inf half without a word.
MASK = bad_op(
    "aten.where", tensor(9.0), scalars=(FP32_MIN,), pos_inf=0, neg_inf=40, nan=0, module="attn",
    consumers=("_softmax",),
)  # fmt: skip
# mmcv#1488: a half sigmoid rounds to 1, and 1 - p to 0.
LOG_ZERO = bad_op(
    "aten.log", tensor(0.5, zeros=3, producers=("rsub", "sigmoid")), pos_inf=0, neg_inf=3,
    fp32_finite=False, module="",
)  # fmt: skip
# pytorch#32137: clamp_min(1e-12) is clamp_min(0) in half, and 4 of 32 rows are zero.
EPS = bad_op(
    "aten.div", tensor(1.0, zeros=4), tensor(2.0, zeros=4, producers=("clamp_min",)),
    pos_inf=0, nan=256, fp32_finite=False, module="scale_rows",
)  # fmt: skip
# pytorch#133085: h*h in an RMS norm; rsqrt(inf) is 0, and no NaN shows anywhere.
SQUARE = bad_op(
    "aten.mul", tensor(1000.0), tensor(1000.0), fp32_max=1e6, module="norm",
    reached_loss=False, reached_gradient=False, consumers=("mean", "add", "rsqrt"),
)  # fmt: skip
# segmentation_models.pytorch#463: the sum of 2 x 384 x 384 probabilities.
SUM = bad_op("aten.sum", tensor(1.0), fp32_max=294912.0, module="", pos_inf=1, total=1)
# pytorch#68425: exp(12) of the branch that `where` does not take, beyond 65,504.
BRANCH = bad_op(
    "aten.exp", tensor(12.0), fp32_max=162754.8, module="", consumers=("where",), reached_loss=False
)
# pytorch#2421: the derivative of sqrt at zero, in distances of points from themselves.
SLOPE = bad_op(
    "aten.div", tensor(1.0), tensor(3.0, zeros=16), phase="backward", node="SqrtBackward0",
    fp32_finite=False, pos_inf=16, module="", reached_loss=False,
)  # fmt: skip
# LightningDOT#5: a summed loss; its gradient overflows in a backward product.
STEEP = bad_op(
    "aten.mm", tensor(30000.0), WEIGHT, phase="backward", node="AddmmBackward0",
    fp32_max=2.6e5, reached_loss=False,
)  # fmt: skip


def silent_square() -> Evidence:
    """The RMS norm returns zeros: the loss is flat and 99 % of the gradients are zero."""
    return evidence(run(steps(FLAT, grad_zero=990), SQUARE))


def fully_masked_row() -> Evidence:
    """pytorch#41508: losses are finite, gradients NaN in every precision."""
    row = OpUse("fully_masked_row", "_softmax", "attention", LINE, 0, 4.0, 32.0)
    dead = but(steps((1.5, *(NAN,) * (STEPS - 1))), range(STEPS), grad_nonfinite=1000)
    return evidence(
        run(steps(FLAT, **OVERFLOWED), row),
        fp32_run(but(dead, range(STEPS), weight_nonfinite=1000), row),
    )


def empty_loss() -> Evidence:
    """pytorch#70348: batch 3 has no label; its loss is NaN everywhere, its gradients are zero."""
    nll = bad_op(
        "aten.nll_loss_forward", tensor(0.0), nan=1, pos_inf=0, total=1, step=3, count=1,
        last_step=3, module="", dtype="fp32", reached_gradient=False,
    )  # fmt: skip
    losses = [NAN if n == 3 else x for n, x in enumerate(FALLING)]
    made = but(steps(losses), [3], grad_zero=1000)
    return evidence(run(made, nll), fp32_run(made, nll))


def singular_slope() -> Evidence:
    """Half skips for ever; fp32 is NaN from step 1."""
    first = but(steps((1.5, *(NAN,) * (STEPS - 1))), range(STEPS), grad_nonfinite=16)
    broken = but(first, range(STEPS), weight_nonfinite=16)
    slope = bad_op("aten.div", phase="backward", node="SqrtBackward0", dtype="fp32", module="")
    return evidence(run(steps(FLAT, **OVERFLOWED), SLOPE), fp32_run(broken, slope))


def custom_function() -> Evidence:
    """exp inside a Function without custom_fwd overflows in half."""
    inside = bad_op("aten.exp", tensor(12.0), fp32_max=162754.8, function="SwishOp", module="act")
    use = OpUse("undecorated_function", "SwishOp", "act", LINE, 0)
    return evidence(run(steps((NAN,) * STEPS, **OVERFLOWED), inside, use))


def banned_loss() -> Evidence:
    """pytorch#61098: CUDA raises; a CPU trains, so the use is all there is to see."""
    use = OpUse("bce_under_autocast", "binary_cross_entropy", "", LINE, 0, count=STEPS)
    return evidence(run(steps(), use))


def embedding_sum() -> Evidence:
    """mxnet#17703: 100,000 gradients of 0.01 for 4 rows; fp16 says 32, fp32 250."""
    inaccurate = bad_op(
        "aten.embedding_dense_backward", kind="coarse", phase="backward", module="embed",
        error=(250.0 - 32.0) / 250.0, reached_loss=False, reached_gradient=False, pos_inf=0,
    )  # fmt: skip
    return evidence(run(steps(FLAT), inaccurate))


def repeated_positions() -> Evidence:
    """transformers#25681: 2,048 positions in bf16, of which 641 are distinct."""
    use = OpUse("half_range", "arange", "rotary", LINE, 0, 641.0, 2048.0)
    return evidence(run(steps(FLAT), use))


def features_that_cancel() -> Evidence:
    """flash-linear-attention#1261: elu(x) + 1 in bf16, where elu(x) is -1: all features are 0."""
    lost = bad_op(
        "aten.add", tensor(1.0, producers=("elu", "addmm")), kind="cancelled", dtype="bf16",
        module="attn", error=1.0, share=1.0, fp32_max=2.4e-4, reached_loss=False,
        reached_gradient=True, pos_inf=0, nan=0,
    )  # fmt: skip
    return evidence(run(steps(FLAT), lost))


def merged_ids() -> Evidence:
    """gluon-face#28: 5,998 ids in fp16, of which 3,548 are left; read as labels further on."""
    site = HalfSite(
        "cast", LINE, "Tensor.to", "fp16", role="whole numbers", prepares=True, calls=1,
        elements=5998, changed=2450, merged=2450, distinct=5998, whole=True, largest=5997.0,
    )  # fmt: skip
    read = OpUse("half_whole", "_to_copy", "", "train.py:30", 0, 330.0, 512.0)
    return evidence(run(steps(FLAT), site, read))


OF_OPS = {
    "activation_overflow": lambda: fails_forward(ACTIVATION),
    "attention_logit_overflow": lambda: fails_forward(LOGITS),
    "mask_constant_overflow": lambda: fails_forward(MASK),
    "log_zero_saturation": lambda: fails_forward(LOG_ZERO),
    "norm_eps_underflow": lambda: fails_forward(EPS),
    "elementwise_overflow": silent_square,
    "reduction_overflow": lambda: fails_forward(SUM),
    "fully_masked_row": fully_masked_row,
    "empty_loss_reduction": empty_loss,
    "masked_branch_gradient": lambda: skips_with_finite_loss(BRANCH),
    "singular_gradient": singular_slope,
    "unsafe_op_under_autocast": custom_function,
    "half_accumulation_stagnation": embedding_sum,
    "low_precision_constants": repeated_positions,
    "cancellation": features_that_cancel,
    "rounded_whole_numbers": merged_ids,
}
