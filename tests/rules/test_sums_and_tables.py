"""Sums that stall, tables that are coarse, statistics that are poisoned."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.diagnosis.findings import diagnose
from ampscope.numerics.formats import BF16
from ampscope.observations import HalfSite, OpUse, Scan
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FLAT,
    LINE,
    NAN,
    OVERFLOWED,
    STEPS,
    answers,
    bad_op,
    but,
    causes,
    evidence,
    fp32_run,
    run,
    scan,
    status,
    steps,
    tensor,
)
from tests.helpers.evidence_of_runs import poisoned_statistics

SUM = "half_accumulation_stagnation"
COUNTER = bad_op(
    "aten.add_", tensor(2048.0), tensor(1.0), kind="stall", error=1.0, pos_inf=0, module="",
    reached_loss=False, reached_gradient=False,
)  # fmt: skip
TABLE = scan("start", "buffer", "rotary.cos", dtype="bf16")


def test_a_counter_that_stands_at_2048_is_a_stalled_sum() -> None:
    found = diagnose(evidence(run(steps(), COUNTER))).findings[0]
    assert (found.cause, found.verdict.op, found.verdict.line) == (SUM, "aten.add_", LINE)
    assert found.verdict.evidence[0].value == STEPS
    measured = {(m.name, m.value) for m in found.verdict.evidence}
    assert ("largest magnitude of input 1", 2048.0) in measured


def test_a_few_additions_without_effect_are_coincidence() -> None:
    assert status(SUM, evidence(run(steps(), replace(COUNTER, count=3)))) is Status.PASSED


def test_a_residual_that_adds_next_to_nothing_is_no_running_sum() -> None:
    residual = replace(COUNTER, op="aten.add", inputs=(tensor(9.0, producers=("addmm",)),))
    assert status(SUM, evidence(run(steps(), residual))) is Status.PASSED


def test_a_total_made_by_the_same_op_is_a_running_sum() -> None:
    total = replace(COUNTER, op="aten.add", inputs=(tensor(2048.0, producers=("add",)),))
    assert status(SUM, evidence(run(steps(), total))) is Status.FOUND


def test_rounding_errors_of_a_running_sum_add_up() -> None:
    # bf16 counts to 256; of 320 counts 64 are lost: a fifth of the total.
    drift = replace(COUNTER, kind="drift", error=64 / 320, dtype="bf16")
    said = answers(evidence(run(steps(), drift)))[SUM]
    assert said.status is Status.FOUND
    assert "20%" in said.reason
    assert said.evidence[0].value == 0.2


def test_a_total_that_was_made_in_half_is_made_in_fp32_with_its_sum() -> None:
    drift = replace(COUNTER, kind="drift", error=0.2, dtype="bf16")
    total = HalfSite("made", "train.py:25", "torch.zeros", "bf16", calls=1)
    others = (
        replace(total, line="train.py:26", dtype="fp16"), replace(total, line=LINE),
        replace(total, line="train.py:27", kind="cast"),
    )  # fmt: skip
    with_total, alone = f"fp32_lines:{LINE},train.py:25", f"fp32_lines:{LINE}"
    said = answers(evidence(run(steps(), drift, total, *others)))[SUM]
    assert said.fix.controls == (with_total, alone)
    assert answers(evidence(run(steps(), drift, *others)))[SUM].fix.controls == (alone,)
    coarse = replace(drift, kind="coarse", op="aten.sum")
    assert answers(evidence(run(steps(), coarse, total)))[SUM].fix.controls == (alone,)


def test_a_sum_that_overflows_is_not_blamed_for_what_it_rounds_off() -> None:
    drift = replace(COUNTER, kind="drift", error=0.06)
    sums = (tensor(64768.0), tensor(1358.0))
    overflow = bad_op("aten.add", *sums, id=9, line=drift.line, fp32_max=66126.0)
    made = evidence(run(steps((NAN,) * STEPS, **OVERFLOWED), drift, overflow))
    assert status(SUM, made) is Status.PASSED
    assert causes(diagnose(made)) == ["activation_overflow"]


def test_the_sum_that_is_furthest_from_fp32_is_named() -> None:
    near = replace(COUNTER, kind="coarse", op="aten.sum", error=0.06)
    far = replace(near, id=1, op="aten.index_add_", error=0.87)
    said = answers(evidence(run(steps(), near, far)))[SUM]
    assert (said.op, said.evidence[0].value) == ("aten.index_add_", 0.87)
    assert "87%" in said.reason


def test_without_an_op_trace_no_sum_is_blamed() -> None:
    assert status(SUM, evidence(run(steps(FLAT)))) is Status.PASSED


def angles() -> list[float]:
    """Positions of a rotary embedding, in radians, beyond what bf16 counts."""
    return [float(n) for n in range(1024, 1536)]


def rounded(value: float) -> float:
    """The bf16 number nearest to ``value``."""
    return round(value / BF16.ulp(value)) * BF16.ulp(value)


def tables(own: list[float], dtype: str = "bf16") -> Evidence:
    """A buffer built from ``own`` angles as it is, and from exact ones in fp32."""
    half = replace(TABLE, dtype=dtype, sample=tuple(map(math.cos, own)))
    exact = replace(TABLE, dtype="fp32", sample=tuple(map(math.cos, angles())))
    return evidence(run(steps(), half), fp32_run(None, exact))


def test_cosines_of_half_positions_are_another_table() -> None:
    found = diagnose(tables([rounded(x) for x in angles()])).findings[0]
    assert found.cause == "low_precision_constants"
    assert found.verdict.module == "rotary"
    assert found.verdict.step == 0


def test_a_table_that_was_only_rounded_at_the_end_is_sound() -> None:
    exact = [math.cos(x) for x in angles()]
    half = replace(TABLE, sample=tuple(map(rounded, exact)))
    made = evidence(run(steps(), half), fp32_run(None, replace(TABLE, sample=tuple(exact))))
    assert status("low_precision_constants", made) is Status.PASSED


def test_a_table_in_fp32_is_not_looked_at() -> None:
    made = tables([rounded(x) for x in angles()], dtype="fp32")
    assert status("low_precision_constants", made) is Status.PASSED


def test_a_half_copy_of_what_was_trained_is_no_table() -> None:
    """As is validated at the end: each run holds the statistics of its own training."""
    half = replace(TABLE, step=12, sample=(1.0, 0.4, 0.6))
    exact = replace(TABLE, step=12, dtype="fp32", sample=(1.1, 0.2, 0.7))
    made = evidence(run(steps(), half), fp32_run(None, exact))
    assert status("low_precision_constants", made) is Status.PASSED


def test_the_argument_of_a_sine_is_rounded_by_more_than_a_quarter_radian() -> None:
    # bf16 spaces numbers by 8 at 1,024: an argument is off by up to 4 radians.
    use = OpUse("half_phase", "cos", "rotary", LINE, 0, 4.0, 1024.0)
    found = diagnose(evidence(run(steps(FLAT), use))).findings[0]
    assert (found.cause, found.verdict.op) == ("low_precision_constants", "aten.cos")


def test_a_sine_as_an_activation_has_no_table_to_build_in_fp32() -> None:
    use = OpUse("half_learned_phase", "sin", "net.0", LINE, 0, 4.3, 1112.0)
    found = diagnose(evidence(run(steps(FLAT), use))).findings[0]
    assert (found.cause, found.verdict.module) == ("low_precision_constants", "net.0")
    assert "['net.0']" in found.verdict.fix.patch
    assert "arange" not in found.verdict.fix.patch
    assert found.verdict.fix.controls == (f"fp32_lines:{LINE}", "fp32_modules:net.0")


def test_a_constant_that_rounding_took_away_is_found() -> None:
    use = OpUse("half_constant", "mul", "", LINE, 0, 1.0, 0.25)
    found = diagnose(evidence(run(steps(FLAT), use))).findings[0]
    assert (found.cause, found.verdict.line) == ("low_precision_constants", LINE)
    assert found.verdict.fix.controls == (f"fp32_lines:{LINE}",)


def test_a_table_without_its_fp32_twin_is_not_judged() -> None:
    half = run(steps(), replace(TABLE, sample=(1.0, 2.0)))
    longer = fp32_run(None, replace(TABLE, dtype="fp32", sample=(1.0, 2.0, 9.0)))
    assert status("low_precision_constants", evidence(half, longer)) is Status.PASSED
    said = answers(evidence(half, fp32=None))["low_precision_constants"]
    assert said.status is Status.INCONCLUSIVE


BUFFER = scan("end", "buffer", "bn.running_var", inf=4)
STATS = "batchnorm_stats_corrupted"


def test_the_poisoned_step_is_named() -> None:
    said = answers(poisoned_statistics())[STATS]
    assert (said.step, said.module) == (5, "bn")


def test_statistics_that_outgrew_half_precision_are_named_and_are_no_constant() -> None:
    """The buffers are not seen at the end where the script's function has returned."""
    use = OpUse("half_statistics", "native_batch_norm", "bn", LINE, 20, 1.0, 0.25)
    found = diagnose(evidence(run(steps(FLAT), use)))
    assert causes(found) == [STATS]
    verdict = found.findings[0].verdict
    assert (verdict.module, verdict.line, verdict.step) == ("bn", LINE, 20)
    assert verdict.fix.controls == ("fp32_modules:bn", "bf16")


def test_finite_statistics_are_sound() -> None:
    assert status(STATS, evidence(run(steps(), scan("end", "buffer", "bn.running_var")))) is (
        Status.PASSED
    )


def test_buffers_are_a_consequence_where_the_weights_broke() -> None:
    made = but(steps((NAN,) * STEPS), range(STEPS), weight_nonfinite=5)
    assert status(STATS, evidence(run(made, BUFFER))) is Status.PASSED


def test_buffers_are_a_consequence_where_only_the_end_shows_broken_weights() -> None:
    weight = scan("end", "parameter", "fc1.weight", nan=3)
    assert status(STATS, evidence(run(steps(), BUFFER, weight))) is Status.PASSED


def test_buffers_are_a_consequence_where_most_losses_are_nan() -> None:
    made = steps((NAN,) * STEPS, **OVERFLOWED)
    assert status(STATS, evidence(run(made, BUFFER))) is Status.PASSED


def test_a_mask_of_infinities_was_a_mask_from_the_start() -> None:
    mask = scan("end", "buffer", "attn.mask", inf=120)
    made = evidence(run(steps(), replace(mask, moment="start"), mask))
    assert diagnose(made).verdict == "no_fault"


@pytest.mark.parametrize("ended", [(BUFFER,), ()])
def test_statistics_that_fp32_spoils_too_are_not_amps_alone(ended: tuple[Scan, ...]) -> None:
    made = evidence(run(steps(), BUFFER), fp32_run(None, *ended))
    assert status(STATS, made) is (Status.INCONCLUSIVE if ended else Status.FOUND)


def test_an_overflow_explains_the_statistics_that_it_poisons() -> None:
    op = bad_op("aten.addmm", fp32_max=66246.0, step=5, count=1, last_step=5)
    usual = poisoned_statistics().baseline
    made = evidence(run(usual.steps, *usual.scans, op, eval_nonfinite=True))
    found = diagnose(made)
    assert causes(found) == ["activation_overflow"]
    assert [c.cause for c in found.findings[0].consequences] == [STATS]


@pytest.mark.parametrize(("op", "builds_a_range"), [("arange", True), ("_to_copy", False)])
def test_a_cast_of_data_is_no_range_to_be_built_anew(op: str, builds_a_range: bool) -> None:
    use = OpUse("half_range", op, "", LINE, 0, 641.0, 2048.0)
    found = answers(evidence(run(steps(FLAT), use)))["low_precision_constants"]
    assert found.status is Status.FOUND
    assert bool(found.fix.patch) is builds_a_range
    assert found.fix.controls == (f"fp32_lines:{LINE}",)
