"""Verdict, losses and promises over results whose right answer is known by hand."""

from __future__ import annotations

import json
import math

import pytest

from ampscope.ext.compare.batches import batches_by_precision as searches_of
from ampscope.ext.compare.batches import sentence
from ampscope.ext.compare.comparison import (
    LossChange,
    by_precision,
    cost_per_million,
    loss_difference,
    memory_ratio,
    speedup,
)
from ampscope.ext.compare.verdict import (
    Pays,
    batch_at_the_same_memory,
    claims,
    comparison_json,
    launch_bound,
    no_fast_path,
    verdict,
)
from ampscope.records import LargestBatch, LossCurve, Machine, RunInfo, RunSpec, State
from tests.helpers.made_comparisons import (
    CPU,
    MIB,
    compared,
    curves,
    diverged,
    made_trial,
    memory,
    searched,
    times,
)

V100 = Machine("cuda:0", "Tesla V100-SXM2-16GB", "cuda", "7.0")


def test_twice_as_fast_at_the_same_loss_pays() -> None:
    found = verdict(by_precision(compared()))
    assert found.pays is Pays.TIME
    assert found.sentence == (
        "AMP pays here: bf16 is 2.00× as fast as fp32 at the same loss; bf16 needs no scaler."
    )


def test_a_twentieth_is_not_worth_it() -> None:
    results = compared(0.2, 0.19, larger=(0.8, 0.79))
    results = [r for r in results if "MemorySplit" not in type(r).__name__]
    found = verdict(by_precision(results))
    assert found.pays is Pays.NO
    assert found.sentence == (
        "AMP does not pay here: bf16 takes about the same time as fp32 (0.95×)."
    )


def test_a_gain_within_the_quartiles_is_none() -> None:
    from dataclasses import replace

    from ampscope.records import StepTimes, Timing

    noisy = [
        replace(r, step=Timing(r.step.median_s, 0.05, 0.4, 9)) if isinstance(r, StepTimes) else r
        for r in compared(0.2, 0.17)
    ]
    found = verdict(by_precision(noisy))
    assert found.pays is Pays.UNKNOWN
    assert found.sentence.startswith("Too noisy to decide: bf16 is 1.18× as fast as fp32")


def test_the_one_with_the_same_loss_is_chosen_before_a_faster_one() -> None:
    results = [*compared(0.2, 0.11), *curves("fp16", 0.5), times("fp16", 0.1)]
    found = verdict(by_precision(results))
    assert (found.pays, found.precision) == (Pays.TIME, "bf16")
    slow = [*compared(0.2, 0.25), *curves("fp16", 0.5), times("fp16", 0.1)]
    assert verdict(by_precision(slow)).sentence.startswith("Look at the loss first: fp16")


def test_a_larger_batch_does_not_excuse_another_loss() -> None:
    found = verdict(by_precision(compared(0.2, 0.22, shift=0.5, larger=(0.8, 0.4))))
    assert found.pays is Pays.UNKNOWN


def test_tf32_is_set_beside() -> None:
    results = [*compared(), *curves("tf32"), times("tf32", 0.125)]
    assert verdict(by_precision(results)).sentence.endswith(
        "bf16 needs no scaler. TF32 alone, without autocast, is 1.60× as fast as fp32."
    )


def test_memory_alone_is_said_so() -> None:
    found = verdict(by_precision(compared(0.2, 0.2, larger=(0.8, 0.8))))
    assert found.pays is Pays.MEMORY
    assert "60% of the peak" in found.sentence


def test_a_larger_batch_at_which_it_pays_is_named() -> None:
    found = verdict(by_precision(compared(0.2, 0.22, larger=(0.8, 0.4))))
    assert found.pays is Pays.LARGER
    assert found.sentence == (
        "AMP does not pay at a batch of 8: bf16 takes about the same time as fp32 (1.10×), most of "
        "which goes into launching ops; with 32 samples it is 2.00× as fast."
    )


def test_a_loss_that_differs_is_no_success() -> None:
    found = verdict(by_precision(compared(shift=0.5)))
    assert found.pays is Pays.UNKNOWN
    assert found.sentence.startswith("Look at the loss first: bf16 is 2.00× as fast")


def test_where_fp32_itself_diverges_nothing_is_compared() -> None:
    results = [*diverged("fp32"), *diverged("bf16"), times("fp32", 0.2), times("bf16", 0.1)]
    found = verdict(by_precision(results))
    assert found.pays is Pays.UNKNOWN
    assert found.sentence == (
        "fp32 itself is first not finite at step 1: find out why first, with ampscope diagnose."
    )


def test_divergence_is_told() -> None:
    results = [*curves("fp32"), *diverged("fp16"), times("fp32", 0.2), times("fp16", 0.1)]
    found = verdict(by_precision(results))
    assert found.pays is Pays.NO
    assert "fp16 diverged at step 1 where fp32 did not" in found.sentence


@pytest.mark.parametrize("results", [[], [times("bf16", 0.1)], [times("fp32", 0.1)]])
def test_without_a_pair_there_is_no_verdict(results: list[object]) -> None:
    assert verdict(by_precision(results)).pays is Pays.UNKNOWN  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shift", "change"),
    [
        (0.0, LossChange.SAME),
        (0.2, LossChange.SAME),  # the seeds' own range is 1.2 - 1.0
        (0.21, LossChange.DIFFERENT),
        (-0.5, LossChange.DIFFERENT),
        (math.nan, LossChange.DIVERGED),
        (math.inf, LossChange.DIVERGED),
    ],
)
def test_losses_are_measured_by_what_seeds_do(shift: float, change: LossChange) -> None:
    base, other = by_precision([*curves("fp32"), *curves("fp16", shift)])
    found = loss_difference(base, other)
    assert found.change is change
    if math.isfinite(shift):
        assert found.gap == pytest.approx(shift)
        assert found.noise == pytest.approx(0.2)


def test_one_seed_or_fewer_steps_leave_the_loss_unknown() -> None:
    one = by_precision([*curves("fp32", seeds=[0]), *curves("bf16", seeds=[0])])
    assert loss_difference(*one).change is LossChange.UNKNOWN
    short = [LossCurve("fp16", seed, (3.0, 2.0), ()) for seed in (0, 1)]
    fewer = by_precision([*curves("fp32"), *short])
    assert loss_difference(*fewer).change is LossChange.UNKNOWN


def test_ratios_carry_their_quartiles() -> None:
    ratio = speedup(times("fp32", 0.2), times("bf16", 0.1))
    assert ratio.value == 2
    assert ratio.low == pytest.approx(2 * 0.98 / 1.02)
    assert ratio.high == pytest.approx(2 * 1.02 / 0.98)


def test_promises_are_set_against_measurements() -> None:
    base, other = by_precision(compared())
    speed, less, batch = claims(base, other, CPU)
    assert (speed.is_met, less.is_met, batch.is_met) == (True, True, True)
    assert less.measured == "40% less"
    # (100 - 20) MiB over 5 MiB a sample is 16 samples: twice 8.
    assert batch_at_the_same_memory(base, other) == pytest.approx(2.0)


def test_reasons_rest_on_measurements() -> None:
    results = compared(0.2, 0.19, larger=(0.22, 0.21))
    results = [r for r in results if type(r).__name__ != "MemorySplit"]
    results += [
        memory("fp32", 20 * MIB, 80 * MIB), memory("bf16", 18 * MIB, 80 * MIB),
    ]  # fmt: skip
    base, other = by_precision(results)
    assert launch_bound(other) == (4, pytest.approx(0.21 / 0.19))
    speed, less, batch = claims(base, other, CPU)
    assert "launching ops" in speed.why
    assert "80% of the base's peak is weights" in less.why
    assert "activations shrink only to 90%" in less.why
    grown = memory("bf16", 30 * MIB, 80 * MIB)
    base, other = by_precision([*results[:-1], grown])
    assert "activations do not shrink: many ops" in claims(base, other, CPU)[1].why
    assert batch.is_met is None


def test_a_device_without_a_path_is_named() -> None:
    assert no_fast_path(CPU, "bf16") == ""
    assert no_fast_path(CPU, "fp16") == "this CPU has no instruction for matmuls in fp16"
    assert no_fast_path(V100, "fp16-noscaler") == ""
    assert no_fast_path(V100, "bf16") == "this GPU has no Tensor Cores for bf16"
    assert no_fast_path(Machine("cpu", "?", "native"), "fp16") == ""  # flags cannot be read
    assert no_fast_path(None, "fp16") == ""


def test_memory_ratio_and_cost() -> None:
    base, other = by_precision(compared())
    assert memory_ratio(base, other) == pytest.approx(60 / 100)
    # 8 samples in 0.2 s are 40 a second; a million take 25,000 s, at 3.6 an hour 25.
    assert cost_per_million(times("fp32", 0.2), 3.6) == pytest.approx(25.0)
    assert cost_per_million(times("fp32", 0.2, samples=0), 3.6) is None


def test_json_keeps_what_is_not_finite() -> None:
    results = [*curves("fp32"), *diverged("fp16"), times("fp32", 0.2), times("fp16", 0.1)]
    spec = RunSpec("gpt", kind="compare", size="small")
    info = RunInfo("ab", spec, State.FINISHED, 1.0, 1.0, 2.0, 2.0, 1, CPU, "A note.", "", 3, None)
    found = json.loads(comparison_json(info, results, ["The GPU was shared."]))
    assert found["spoiled"] == ["The GPU was shared."]
    assert found["verdict"]["pays"] == "no"
    assert found["precisions"][1]["curves"][0]["losses"] == [3.0, "inf", "nan"]
    assert found["machine"]["device_name"] == "Test CPU, 2 cores"


def test_the_knee_is_the_smallest_batch_near_the_best() -> None:
    fp32, bf16 = searches_of(searched())
    assert fp32.knee is not None
    assert fp32.knee.samples == 128  # 1,280 a second at 64, 2,133 at 128
    assert bf16.knee is not None
    assert bf16.knee.samples == 200  # 1,280 at 64, 1,429 at 200: 64 has 0.896 of it
    flat = searches_of([made_trial("fp32", 8, 0.01), made_trial("fp32", 80, 0.1)])[0]
    assert flat.knee is not None
    assert flat.knee.samples == 8


def test_the_answer_of_a_search() -> None:
    assert sentence(searches_of(searched())) == (
        "fp32 fits 128 samples (136 do not); bf16 fits 1.6 times that, 200 samples (208 do not)."
    )
    nothing = searches_of([made_trial("fp32", 8, None), LargestBatch("fp32", 0, 8, 1)])
    assert sentence(nothing) == "fp32 fits not even the smallest batch."
    assert sentence(searches_of([made_trial("fp32", 8, 0.1)])) == "The search goes on."
    ended = [r for r in searched() if r != LargestBatch("bf16", 200, 208, 3)]
    early = searches_of([*ended, LargestBatch("bf16", 64, None, 3)])
    assert sentence(early) == (  # no ratio: how many bf16 fits is not known
        "fp32 fits 128 samples (136 do not); "
        "bf16 fits at least 64 samples (the search ended there)."
    )
    odd = searches_of([made_trial("fp32", 512, 0.1), LargestBatch("fp32", 0, 100_000, 2)])
    assert sentence(odd) == ("fp32 fits no batch of the sizes asked for, though 512 samples fit.")
