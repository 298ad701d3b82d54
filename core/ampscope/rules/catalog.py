"""All rules, in the order in which they rank: an explicit tuple, nothing registers itself."""

from __future__ import annotations

import dataclasses
import importlib

from ampscope.rules.verdict import Rule

NAMES = (
    "scaler_protocol_error", "fp16_params_with_scaler", "unsafe_op_under_autocast",
    "bad_initial_state", "bad_input_data", "empty_loss_reduction", "fully_masked_row",
    "batchnorm_stats_corrupted", "clip_before_unscale", "scaler_bypassed",
    "accumulation_scale_mismatch", "shared_scaler_interference", "scaler_state_lost",
    "scaled_gradient_penalty", "low_precision_constants", "half_accumulation_stagnation",
    "optimizer_state_range", "not_amp_divergence", "masked_branch_gradient", "singular_gradient",
    "mask_constant_overflow", "attention_logit_overflow", "log_zero_saturation",
    "norm_eps_underflow", "elementwise_overflow", "reduction_overflow", "activation_overflow",
    "loss_magnitude_overflow", "loss_scale_too_high", "gradient_underflow", "small_update_lost",
)  # fmt: skip


def all_rules() -> tuple[Rule, ...]:
    """Every rule with the text of its file as documentation."""
    rules = []
    for name in NAMES:
        module = importlib.import_module(f"ampscope.rules.{name}")
        rules.append(dataclasses.replace(module.RULE, documentation=module.__doc__ or ""))
    return tuple(rules)
