"""The closed lists: root causes and fix kinds, as data.

``definition`` is what the cause is; ``fix`` the standard remedy. Collected from about 190 public
issues of frameworks and training codebases.
"""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.errors import BadInput


@dataclass(frozen=True, slots=True)
class Cause:
    """One root cause that a diagnosis may name. ``code`` is for good: a cause that is given up
    keeps its number, and a new one takes the next."""

    code: str  # "AMP012"
    name: str
    title: str
    definition: str

    @property
    def titled(self) -> str:
        """The title with its code, as every surface names a cause: "… (AMP012)"."""
        return f"{self.title} ({self.code})"

    @property
    def inside(self) -> str:
        """The title with its code inside a sentence: "the data holds NaN or infinity (AMP028)"."""
        keeps_case = self.title.startswith("BatchNorm")
        return self.titled if keeps_case else self.titled[0].lower() + self.titled[1:]


_CAUSES = (
    Cause("AMP001", "activation_overflow", "An activation overflowed", "A linear, convolution, residual addition or cast has a result beyond the format's largest number."),
    Cause("AMP002", "attention_logit_overflow", "Attention or similarity logits overflowed", "The matmul of queries and keys, or of two embeddings, exceeds the format's largest number before it is scaled."),
    Cause("AMP003", "mask_constant_overflow", "A mask constant does not fit", "A finite fp32 mask constant is not representable in half precision."),
    Cause("AMP004", "fully_masked_row", "A softmax row is masked completely", "Softmax over a row that is minus infinity throughout gives NaN, in every precision."),
    Cause("AMP005", "elementwise_overflow", "An element-wise op overflowed", "A square, cube, exponential, product or quotient exceeds the format's largest number."),
    Cause("AMP006", "reduction_overflow", "A reduction overflowed", "A sum, mean, variance or norm exceeds the range although its inputs are small."),
    Cause("AMP007", "log_zero_saturation", "A logarithm of a saturated probability", "A probability rounded to exactly 0 or 1 before its logarithm was taken."),
    Cause("AMP008", "norm_eps_underflow", "An epsilon vanished in half precision", "A small constant rounds to zero or is absorbed, and the forward pass divides by zero."),
    Cause("AMP009", "singular_gradient", "A derivative is infinite", "The forward pass is finite and a derivative near zero is not (square root, norm, rsqrt, atan2)."),
    Cause("AMP010", "masked_branch_gradient", "The branch that was not taken sent back NaN", "The discarded branch of where or clamp multiplies zero by infinity in the backward pass."),
    Cause("AMP011", "unsafe_op_under_autocast", "An op that autocast forbids", "An op that is banned under autocast, or a custom Function without custom_fwd and custom_bwd."),
    Cause("AMP012", "gradient_underflow", "Gradients underflowed to zero", "Gradients fell below the smallest half-precision number: no scaler, or too small a scale."),
    Cause("AMP013", "loss_scale_too_high", "The loss scale is too high", "Scaled gradients overflow: initial value, static scale, floor, or growth too fast."),
    Cause("AMP014", "loss_magnitude_overflow", "The loss itself is too large", "Loss or gradients are so large that a scale below 1 would be needed."),
    Cause("AMP015", "clip_before_unscale", "Gradients were clipped before unscale_", "The clipping threshold was compared with gradients that still carry the loss scale."),
    Cause("AMP016", "scaler_bypassed", "The scaler was bypassed", "A part of the protocol was left out: a direct optimizer.step, an unscaled loss, a partial unscale_."),
    Cause("AMP017", "scaler_protocol_error", "The scaler was called out of order", "GradScaler's state machine raised: unscale_ twice, step twice, update without step."),
    Cause("AMP018", "accumulation_scale_mismatch", "The scale changed while gradients accumulated", "unscale_ or update was called inside an accumulation window."),
    Cause("AMP019", "shared_scaler_interference", "Two losses share one scaler", "One loss or optimizer drags down the scale that another one needs."),
    Cause("AMP020", "scaled_gradient_penalty", "A gradient penalty used scaled gradients", "Gradients entered a loss while they still carried the loss scale."),
    Cause("AMP021", "scaler_state_lost", "The scaler's state was not restored", "Training resumed with a fresh scaler, and the scale jumped back to its initial value."),
    Cause("AMP022", "fp16_params_with_scaler", "Half-precision parameters with a GradScaler", "Trainable parameters are fp16, whose gradients GradScaler refuses to unscale."),
    Cause("AMP023", "optimizer_state_range", "Optimizer state left the half-precision range", "A moment or the epsilon of the optimizer underflows, overflows or stagnates in half precision."),
    Cause("AMP024", "small_update_lost", "Updates are too small for the weights' precision", "w + update equals w: weights, moving averages or weight decay stand still in half precision."),
    Cause("AMP025", "half_accumulation_stagnation", "A running sum stagnated in half precision", "A long sum in half precision stops growing although terms keep coming."),
    Cause("AMP026", "low_precision_constants", "Constants were built in half precision", "A table, position index or schedule was computed or stored in half precision."),
    Cause("AMP027", "batchnorm_stats_corrupted", "BatchNorm's running statistics are not finite", "One bad forward pass poisoned the running statistics, although the weights are sound."),
    Cause("AMP028", "bad_input_data", "The data holds NaN or infinity", "Inputs or targets are not finite before the first op sees them."),
    Cause("AMP029", "not_amp_divergence", "Divergence that has nothing to do with AMP", "The fp32 control diverges too: learning rate too high, or an exploding recurrence."),
    Cause("AMP030", "bad_initial_state", "The weights were bad before training", "NaN, infinity or absurd magnitudes in the parameters before the first step."),
    Cause("AMP031", "empty_loss_reduction", "A mean over nothing", "The loss averaged an empty set, in every precision."),
    Cause("AMP032", "compiler_precision", "The compiler rounds where eager code does not, or the reverse", "Compiled code leaves out casts of eager code, and the training depends on them."),
    Cause("AMP033", "compiler_kernel", "A compiled kernel computes something else", "The captured graph is right; the kernels that the compiler made of it are not."),
    Cause("AMP034", "graph_semantics", "The compiled graph is not what the script does", "Capturing the script, or making its graph functional, changed what it computes."),
    Cause("AMP035", "vanishes_when_observed", "A compiled fault vanishes when it is observed", "Compiled code computes something else, and reading its intermediate results brings the right ones back."),
    Cause("AMP000", "no_fault", "No fault", "What was seen is expected: a scale search, structural zeros, a harmless intermediate infinity."),
)  # fmt: skip

CAUSES: dict[str, Cause] = {cause.name: cause for cause in _CAUSES}
LIST_VERSION = 3  # of the codes; a new cause raises it


@dataclass(frozen=True, slots=True)
class Code:
    """What is reported of a source that was not run. ``level`` is SARIF's: error, warning or note."""

    code: str  # "PRE001", or that of a cause
    name: str
    title: str
    level: str
    evidence: str  # what in the source shows it
    remedy: str


def find_cause(text: str) -> Cause:
    """By code ("AMP012", "amp12", "12") or name. Raises BadInput for a text that is neither."""
    wanted = text.strip().lower()
    number = wanted.removeprefix("amp")
    code = f"AMP{int(number):03d}" if number.isdecimal() else ""
    for cause in _CAUSES:
        if wanted == cause.name or code == cause.code:
            return cause
    raise BadInput(f"There is no cause {text!r}. `ampscope explain` lists them all.")


# The kinds of fix, and the sentence that introduces one.
FIX_KINDS: dict[str, str] = {
    "use_bf16": "Use bfloat16: it has the range of fp32 and needs no loss scale.",
    "fp32_module": "Keep these modules in fp32.",
    "add_scaler": "Scale the loss with a GradScaler.",
    "change_scale": "Change the loss scale.",
    "move_unscale": "Call scaler.unscale_(optimizer) before gradients are clipped or read.",
    "raise_eps": "Use a larger epsilon.",
    "rewrite_op": "Rewrite the expression.",
    "drop_cast": "Leave out the cast to half precision.",
    "fp32_params": "Keep the parameters in fp32 and let autocast choose the compute precision.",
    "fp32_optimizer_state": "Keep the optimizer's state in fp32.",
    "fix_data": "Repair or drop the bad samples.",
    "lower_lr": "Lower the learning rate, or warm it up.",
    "fix_init": "Initialise the weights properly.",
    "guard_reduction": "Guard the reduction against an empty set.",
    "scaler_protocol": "Call the scaler's methods in their order, once each.",
    "save_scaler_state": "Save and load the scaler's state with the checkpoint.",
    "separate_scalers": "Use one scaler for each loss and optimizer.",
    "emulate_casts": "Let the compiler round where eager code rounds.",
    "change_backend": "Compile with another backend.",
    "no_compile": "Leave a part uncompiled.",
    "keep_unfused": "Keep an op out of the compiler's kernels.",
    "none": "Nothing needs to change.",
}
