"""Causes have codes for good, and ``ampscope explain`` tells what a code means."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from ampscope import extensions
from ampscope.causes import CAUSES, find_cause
from ampscope.cli.zoo import explain
from ampscope.errors import BadInput
from ampscope.rules.catalog import LIST_VERSION, NAMES

# What each version of the list promised: JSON, documents and users' notes name these.
VERSION_1 = """
000 no_fault 001 activation_overflow 002 attention_logit_overflow 003 mask_constant_overflow
004 fully_masked_row 005 elementwise_overflow 006 reduction_overflow 007 log_zero_saturation
008 norm_eps_underflow 009 singular_gradient 010 masked_branch_gradient
011 unsafe_op_under_autocast 012 gradient_underflow 013 loss_scale_too_high
014 loss_magnitude_overflow 015 clip_before_unscale 016 scaler_bypassed 017 scaler_protocol_error
018 accumulation_scale_mismatch 019 shared_scaler_interference 020 scaled_gradient_penalty
021 scaler_state_lost 022 fp16_params_with_scaler 023 optimizer_state_range 024 small_update_lost
025 half_accumulation_stagnation 026 low_precision_constants 027 batchnorm_stats_corrupted
028 bad_input_data 029 not_amp_divergence 030 bad_initial_state 031 empty_loss_reduction
"""
ADDED_BY_2 = "032 compiler_precision 033 compiler_kernel 034 graph_semantics"
ADDED_BY_3 = "035 vanishes_when_observed"
ADDED_BY_4 = """
036 harmful_rounding 037 stale_low_precision_copy 038 cancellation 039 rounded_whole_numbers
"""
GIVEN = f"{VERSION_1} {ADDED_BY_2} {ADDED_BY_3} {ADDED_BY_4}".split()
CODES = dict(zip(GIVEN[1::2], GIVEN[::2], strict=True))


def test_codes_stay_as_they_were_given() -> None:
    assert LIST_VERSION == 4
    assert {c.name: c.code for c in CAUSES.values()} == {n: f"AMP{c}" for n, c in CODES.items()}


@pytest.mark.parametrize("asked", ["AMP012", "amp012", "amp12", "12", " gradient_underflow "])
def test_a_cause_is_found_by_code_and_by_name(asked: str) -> None:
    assert find_cause(asked).name == "gradient_underflow"


@pytest.mark.parametrize("asked", ["", "AMP999", "underflow", "\x1b[31m"])
def test_what_is_no_cause_is_bad_input(asked: str) -> None:
    with pytest.raises(BadInput, match="ampscope explain"):
        find_cause(asked)


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_is_explained_whole(name: str) -> None:
    said = CliRunner().invoke(explain, [name], catch_exceptions=False).output
    for heading in ("What it detects", "Why it matters", "Blind spots", "Remedy", "Code"):
        assert f"\n{heading}\n  " in said
    assert said.startswith(CAUSES[name].code)


def test_without_a_cause_all_are_listed() -> None:
    said = CliRunner().invoke(explain, [], catch_exceptions=False).output
    codes = [line.split()[0] for line in said.splitlines()]
    assert codes[: len(CAUSES)] == [cause.code for cause in CAUSES.values()]
    own = {code.code for code in extensions.codes().values()} - {c.code for c in CAUSES.values()}
    assert codes[len(CAUSES) :] == sorted(own)
