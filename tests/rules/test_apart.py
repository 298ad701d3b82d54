"""Each cause on evidence of its own: the rule fires, it names the place, others do not.

What is expected comes from the definition of the cause and from the public report that the evidence
was written after, never from what a rule once said.
"""

from __future__ import annotations

import pytest

from ampscope.causes import CAUSES
from ampscope.diagnosis.findings import diagnose
from ampscope.rules.catalog import NAMES, all_rules
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import MODULE, answers, causes, evidence, run, steps
from tests.helpers.evidence_of_runs import EVIDENCE_OF

# cause -> (module, op, phase, step, line, kinds of fix that cure it)
EXPECTED = {
    "activation_overflow": (MODULE, "aten.addmm", "forward", 0, "train.py:18", "fp32_module"),
    "attention_logit_overflow": ("attn", "aten.bmm", "forward", 0, "train.py:18", "fp32_module"),
    "mask_constant_overflow": ("attn", "aten.where", "forward", 0, "train.py:18", "rewrite_op"),
    "log_zero_saturation": (None, "aten.log", "forward", 0, "train.py:18", "rewrite_op"),
    "norm_eps_underflow": ("scale_rows", "aten.div", "forward", 0, "train.py:18", "raise_eps"),
    "elementwise_overflow": ("norm", "aten.mul", "forward", 0, "train.py:18", "fp32_module"),
    "reduction_overflow": (None, "aten.sum", "forward", 0, "train.py:18", "rewrite_op"),
    "fully_masked_row": ("attention", "aten._softmax", "forward", 0, "train.py:18", "rewrite_op"),
    "empty_loss_reduction": (
        None, "aten.nll_loss_forward", "forward", 3, "train.py:18", "guard_reduction",
    ),
    "masked_branch_gradient": (None, "aten.exp", "forward", 0, "train.py:18", "rewrite_op"),
    "singular_gradient": (None, "aten.div", "backward", 0, "train.py:18", "rewrite_op"),
    "unsafe_op_under_autocast": ("act", "aten.exp", "forward", 0, "train.py:18", "rewrite_op"),
    "half_accumulation_stagnation": (
        "embed", "aten.embedding_dense_backward", "backward", 0, "train.py:18", "rewrite_op",
    ),
    "low_precision_constants": ("rotary", "aten.arange", "forward", 0, "train.py:18", "rewrite_op"),
    "cancellation": ("attn", "aten.add", "forward", 0, "train.py:18", "rewrite_op"),
    "rounded_whole_numbers": (None, None, "forward", 0, "train.py:18", "drop_cast"),
    "scaler_protocol_error": (None, None, None, 0, "train.py:9", "scaler_protocol"),
    "fp16_params_with_scaler": (None, None, None, 0, "train.py:9", "fp32_params"),
    "clip_before_unscale": (None, None, None, 0, "train.py:4", "move_unscale"),
    "scaler_bypassed": (None, None, None, 1, "train.py:5", "scaler_protocol"),
    "accumulation_scale_mismatch": (None, None, None, 0, "train.py:4", "scaler_protocol"),
    "scaled_gradient_penalty": (None, None, None, 0, "train.py:3", "rewrite_op"),
    "scaler_state_lost": (None, None, None, 30, "train.py:73", "save_scaler_state"),
    "shared_scaler_interference": (None, None, None, 0, "", "separate_scalers"),
    "loss_scale_too_high": (None, None, "backward", 0, "", "change_scale"),
    "loss_magnitude_overflow": (MODULE, "aten.mm", "backward", 0, "train.py:18", "rewrite_op"),
    "gradient_underflow": ("net.0", None, "backward", 0, "train.py:2", "add_scaler"),
    "optimizer_state_range": (None, None, "step", 0, "", "fp32_optimizer_state"),
    "small_update_lost": (None, None, "step", 0, "", "fp32_params"),
    "stale_low_precision_copy": (
        "inp", "aten.addmm", "forward", 1, "train.py:80", "refresh_copies",
    ),
    "batchnorm_stats_corrupted": ("bn", None, "forward", 5, "", "fp32_module"),
    "bad_input_data": (None, None, "forward", 7, "", "fix_data"),
    "not_amp_divergence": (None, None, None, 20, "", "lower_lr"),
    "bad_initial_state": ("classifier", None, None, 0, "", "fix_init"),
    "harmful_rounding": (None, "Tensor.half", None, 0, "train.py:7", "drop_cast"),
    "compiler_precision": (None, None, None, 0, "train.py:7", "emulate_casts"),
    "compiler_kernel": (None, None, None, 0, "train.py:7", "change_backend"),
    "graph_semantics": (None, None, None, 0, "train.py:7", "no_compile"),
    "vanishes_when_observed": (None, None, None, 0, "train.py:7", "change_backend"),
}  # fmt: skip
EXPLAINED = {
    rule.id: {*rule.explains, *(other.id for other in all_rules() if rule.id in other.explained_by)}
    for rule in all_rules()
}


def test_there_is_evidence_of_every_cause() -> None:
    wanted = set(CAUSES) - {"no_fault"}
    assert set(EVIDENCE_OF) == set(EXPECTED) == set(NAMES) == wanted


@pytest.mark.parametrize("cause", EXPECTED)
def test_a_cause_is_found_and_comes_first(cause: str) -> None:
    diagnosis = diagnose(EVIDENCE_OF[cause]())
    assert diagnosis.verdict == "fault"
    assert causes(diagnosis) == [cause]
    found = diagnosis.findings[0].verdict
    place = (found.module, found.op, found.phase, found.step, found.line, found.fix.kind)
    assert place == EXPECTED[cause]
    assert found.reason
    assert found.evidence


@pytest.mark.parametrize("cause", EXPECTED)
def test_no_other_rule_fires_but_for_named_consequences(cause: str) -> None:
    said = answers(EVIDENCE_OF[cause]())
    found = {name for name, verdict in said.items() if verdict.status is Status.FOUND}
    assert found - {cause} <= EXPLAINED[cause]
    assert not [name for name, verdict in said.items() if verdict.status is Status.ERRORED]


@pytest.mark.parametrize("cause", EXPECTED)
def test_nothing_is_found_in_a_healthy_run(cause: str) -> None:
    assert answers(evidence(run(steps())))[cause].status in (Status.PASSED, Status.NOT_APPLICABLE)


@pytest.mark.parametrize("cause", EXPECTED)
def test_a_run_that_recorded_nothing_is_no_error(cause: str) -> None:
    nothing = evidence(run([], calls=[], ended="killed", uses_autocast=""))
    assert answers(nothing)[cause].status not in (Status.ERRORED, Status.FOUND)
