"""Lessons 5, 11, 12 and 14: the effect that each teaches occurs in its measurement."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ampscope.records import Call, MemorySplit, Rate, Reading, StepTimes
from app.ext.lessons import cost, ops, speed
from tests.helpers.lesson_runs import measured, reading


@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_autocast_runs_matmuls_in_half_and_keeps_losses_in_fp32(model: str) -> None:
    calls = [r for r in measured("ops", model=model) if isinstance(r, Call)]
    matmuls = [c for c in calls if c.op in ("mm", "addmm", "bmm", "convolution")
                and c.phase == "forward"]  # fmt: skip
    assert matmuls
    assert {c.outputs for c in matmuls} == {"fp16"}
    losses = [c for c in calls if c.op in ("_softmax", "nll_loss_forward")]
    assert losses
    assert {c.outputs.partition(",")[0] for c in losses} == {"fp32"}
    optimizer = [c for c in calls if c.phase == "step"]
    assert optimizer
    assert not any("fp16" in c.outputs for c in optimizer)  # the weights are fp32
    assert any(c.op == "_to_copy" and (c.inputs, c.outputs) == ("fp32", "fp16") for c in calls)


def test_why_some_ops_stay_in_fp32_is_what_numpy_says() -> None:
    found = measured("ops")
    with np.errstate(over="ignore"):
        assert reading(found, "exp(12)", "fp16") == float(np.exp(np.float16(12))) == math.inf
    assert reading(found, "exp(12)", "fp32") == pytest.approx(math.exp(12), rel=1e-5)
    assert reading(found, "4,096 × 8²", "fp16") == math.inf
    assert reading(found, "4,096 × 8²", "fp32") == 4096 * 64
    assert reading(found, "-log(softmax)", "fp16") == math.inf
    assert reading(found, "-log(softmax)", "fp32") == pytest.approx(20, rel=1e-3)


def test_every_op_of_the_table_is_in_a_list() -> None:
    from ampscope.policy.op_lists import listed_ops

    known = {(o.framework.split()[0], o.where, o.op) for o in listed_ops()}
    for kind, names in ops.KINDS.items():
        found = [(f, w, n) in known for (f, w), n in zip(ops.PLACES, names, strict=True)]
        assert any(found), kind
    table = ops.lists().set_index("op")
    assert list(table.loc["matmul"]) == ["half"] * 3
    assert table.loc["softmax", "PyTorch, CUDA"] == "fp32"


@pytest.mark.parametrize(("model", "batch"), [("gpt", "8"), ("gpt", "64"), ("lenet", "32")])
def test_autocast_does_not_halve_memory(model: str, batch: str) -> None:
    splits = {r.precision: r for r in measured("memory", model=model, batch=batch)
              if isinstance(r, MemorySplit)}  # fmt: skip
    full, amp, pure = splits["fp32"], splits["fp16"], splits["fp16-pure"]
    assert amp.weights == full.weights  # master weights
    assert amp.optimizer_state == full.optimizer_state
    assert amp.cast_copies > 0
    assert amp.activations < full.activations
    assert 0.5 * full.peak < amp.peak
    assert pure.peak < 0.6 * full.peak
    parameters = {"gpt": 314_464, "lenet": 20_522}[model]
    assert full.weights >= 4 * parameters


def test_speed_is_measured_of_matmuls_and_models() -> None:
    found = measured("speed")
    rates = [r for r in found if isinstance(r, Rate)]
    assert {r.dtype for r in rates} >= {"fp32", "bf16"}
    for one in rates:
        assert one.timing is not None
        assert one.timing.repeats >= 7
        assert one.flops == 2 * math.prod(one.shape)
    names = [r.precision for r in found if isinstance(r, StepTimes)]
    assert names == ["mlp fp32", "mlp bf16", "gpt fp32", "gpt bf16"]


def test_speed_has_words_for_a_machine_without_bf16() -> None:
    """Older processors multiply bf16 in software: every size of it is left out."""
    slow = [Reading("too slow here", name, 0.2, "64") for name in ("bf16", "fp16")]
    found = [
        r
        for r in measured("speed")
        if not isinstance(r, Reading) and not (isinstance(r, Rate) and r.dtype == "bf16")
    ]
    text = speed.matmul_words([*found, *slow])
    assert "No size could be multiplied in both" in text
    assert "bf16 was left out from 64 on" in text
    assert "fp16 was left out from 64 on" in text
    assert "left out" in speed.misaligned_words([*found, *slow])


def test_a_tiny_model_gains_nothing() -> None:
    # The lower quartile: other programs only make a step longer.
    times = {r.precision: r.step.low_s for r in measured("speed") if isinstance(r, StepTimes)}
    # Casts of a tiny model cost more than its matmuls can gain, on any machine.
    assert times["mlp fp32"] < 1.3 * times["mlp bf16"]


@pytest.mark.parametrize("model", ["gpt", "lenet", "mlp"])
def test_cost_follows_from_throughput(model: str) -> None:
    found = measured("cost", model=model)
    times = {r.precision: r for r in found if isinstance(r, StepTimes)}
    rows = {str(r["precision"]): r for r in cost.costs(found, 3_600_000, 200, 0.25, 2.0)}
    for name, one in times.items():
        assert one.samples > 0
        hours = 3_600_000 / (one.samples / one.step.median_s) / 3600
        assert rows[name]["hours"] == pytest.approx(hours)
        assert rows[name]["cost of time"] == pytest.approx(2 * hours)
        if rows[name]["energy is"] == "assumed":
            assert rows[name]["kWh"] == pytest.approx(0.2 * hours)
            assert rows[name]["cost"] == pytest.approx(0.25 * 0.2 * hours + 2 * hours)
    assert "assumption" in cost.words(found, list(rows.values()), 200) or any(
        r["energy is"] == "measured" for r in rows.values()
    )


def test_measured_energy_goes_before_an_assumption() -> None:
    from ampscope.records import EnergyUse, Timing

    timing = Timing(0.1, 0.1, 0.1, 5)
    times = StepTimes("fp32", 10, timing, None, None, None, None, 0.0)  # 100 samples per second
    energy = EnergyUse("fp32", 36.0, 6, 10, "RAPL, package 0", 0.0)  # 0.6 J a sample
    (row,) = cost.costs([times, energy], 6_000_000, 999, 0.5, 0.0)
    assert row["kWh"] == pytest.approx(0.6 * 6e6 / 3.6e6)
    assert row["cost"] == pytest.approx(0.5)
    assert "RAPL" in cost.words([times, energy], [row], 999)


def test_a_disturbed_measurement_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampscope.records import Timing
    from app.ext.lessons import lesson_runs

    said: list[str] = []
    monkeypatch.setattr(lesson_runs.st, "warning", lambda text, **_: said.append(text))
    for high in (0.012, 0.030):
        timing = Timing(0.010, 0.009, high, 20)
        lesson_runs.warn([StepTimes("fp32", 8, timing, None, None, None, None, 0.0)])
    assert len(said) == 1
    assert "210" in said[0].replace("\\", "")
