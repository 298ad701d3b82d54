"""Calibration or fault, and what is advised, on trajectories written by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ampscope.analysis.scale_window import ScaleWindow
from ampscope.analysis.skips import SkipCause, SkipEvidence, counted, skip_causes
from ampscope.records import Cadence, RunSpec, ScalerSpec, StepRecord
from ampscope.runner.probe import drive, prepare
from ampscope.scalers.replay import advise, skipped_scales
from ampscope.store.reader import Reader
from ampscope.store.series import bad_gradients
from ampscope.store.writer import RunWriter

CPU = torch.device("cpu")
SPIKY = """
import torch
from torch import nn

from ampscope import Workload


def build(seed):
    torch.manual_seed(seed)

    def batches():
        generator = torch.Generator().manual_seed(0)
        step = 0
        while True:
            step += 1
            yield torch.rand(16, 4, generator=generator), 2000.0 if step % 8 == 0 else 1.0

    def loss(model, batch):
        x, factor = batch
        return model(x).float().mean() * factor

    return Workload(
        model=nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
        batches=batches,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001),
    )
"""


def steps(*pairs: tuple[float, bool, float]) -> list[StepRecord]:
    """(scale, skipped, loss) of each step."""
    return [
        StepRecord(n, scale=scale, skipped=skipped, loss=loss)
        for n, (scale, skipped, loss) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([(8.0, True, 1.0), (4.0, True, 1.0), (2.0, False, 1.0)], ["calibration", "calibration"]),
        ([(8.0, True, math.nan), (4.0, False, 1.0)], ["fault"]),  # one bad batch
        ([(8.0, True, 1.0), (4.0, True, 1.0)], ["unclear", "unclear"]),
        ([(2.0, True, 1.0), (1.0, True, 1.0), (0.5, True, 1.0)], ["unclear", "fault", "fault"]),
        ([(4.0, False, 1.0)], []),
        ([(8.0, True, 1.0), (8.0, False, 1.0)], ["unclear"]),  # finite again at the same scale
        ([(8.0, False, 1.0), (8.0, True, 1.0), (4.0, False, 1.0)], ["unclear"]),  # and before
        ([(8.0, True, 1.0), (4.0, False, 1.0), (8.0, False, 1.0)], ["unclear"]),  # soon after
        ([(4.0, False, 1.0), (8.0, True, 1.0), (4.0, False, 1.0)], ["growth probing"]),
        (  # a scale that has grown is refused, and then the one that held before
            [(4.0, False, 1.0), (8.0, True, 1.0), (4.0, True, 1.0), (2.0, False, 1.0)],
            ["growth probing", "unclear"],
        ),
        (  # a new scaler's start is far above the scale that held: it comes down to that
            [(2.0, False, 1.0), (16.0, True, 1.0), (8.0, True, 1.0), (2.0, False, 1.0)],
            ["growth probing", "growth probing"],
        ),
    ],
)
def test_causes(made: list[tuple[float, bool, float]], expected: list[str]) -> None:
    assert list(skip_causes(steps(*made)).values()) == expected


SPIKED = [(8.0, False, 1.0), (8.0, True, 2.5), (4.0, False, 1.5)]
INF = SkipEvidence(first_inf=3, nan=9, inf=3)


@pytest.mark.parametrize(
    ("made", "known", "expected"),
    [
        (SPIKED, INF, "spike"),
        (SPIKED, SkipEvidence(first_nan=1, first_inf=3, nan=9, inf=3), "unclear"),
        (SPIKED, SkipEvidence(), "unclear"),
        ([(8.0, False, 1.0), (8.0, True, 1.9), (4.0, False, 1.5)], INF, "unclear"),
        ([(8.0, False, 1.0), (8.0, True, 2.5), (4.0, True, 1.5)], INF, "unclear"),
        ([(8.0, False, 1.0), (8.0, True, 2.5), (8.0, False, 1.5)], INF, "unclear"),
        # The shadow at the skip: fp32's gradients times the scale, against 65,504.
        (SPIKED, SkipEvidence(1, 1, 1, 1, fp32_largest=8190.0), "spike"),
        (SPIKED, SkipEvidence(1, 1, 1, 1, fp32_largest=8186.0), "unclear"),
        (SPIKED, SkipEvidence(1, 1, 1, 1, fp32_largest=math.inf), "fault"),
        (SPIKED, SkipEvidence(1, 1, 1, 1, fp32_largest=math.nan), "fault"),
        # Only NaN: 0/0, or Inf - Inf on the way to the weights.
        (SPIKED, SkipEvidence(first_nan=2, nan=7), "NaN alone"),
        (SPIKED, SkipEvidence(first_nan=2, nan=7, fp32_largest=8190.0), "spike"),
        ([(2.0, False, 1.0), (1.0, True, 1.0), (0.5, False, 1.0)], SkipEvidence(2, 0, 7, 0),
         "NaN alone"),
        # Inf - Inf is NaN: while a smaller scale helps, the search for one explains it.
        ([(8.0, True, 1.0), (4.0, False, 1.0)], SkipEvidence(2, 0, 7, 0), "calibration"),
    ],
)  # fmt: skip
def test_what_the_gradients_tell(
    made: list[tuple[float, bool, float]], known: SkipEvidence, expected: str
) -> None:
    found = skip_causes(steps(*made), evidence=dict.fromkeys(range(3), known))
    assert next(iter(found.values())) == expected


def test_a_probe_proves_a_spike_with_the_shadow_of_the_skipped_step(tmp_path: Path) -> None:
    """Every eighth batch is 2,000 times as large; nothing else is wrong."""
    (tmp_path / "spiky.py").write_text(SPIKY)
    cadence = Cadence(histogram=1, trace=0, shadow=1000)
    spec = RunSpec(f"{tmp_path / 'spiky.py'}:build", precision="fp16", steps=12, cadence=cadence,
                   scaler=ScalerSpec(init_scale=1024.0))  # fmt: skip
    plain = drive(spec, prepare(spec, CPU), "rehearsal", None).losses
    writer = RunWriter.create(tmp_path / "s.db", spec)
    loop = drive(spec, prepare(spec, CPU), "rehearsal", writer)
    writer.close()
    assert (loop.losses, loop.note) == (plain, "")  # dropout draws the same numbers
    with Reader(tmp_path / "s.db") as reader:
        made = reader.steps(writer.run_id)
        known = bad_gradients(reader, writer.run_id)
    evidence = {step: SkipEvidence(*counts) for step, counts in known.items()}
    (number,) = [step.step for step in made if step.skipped]
    assert number == 7
    assert (evidence[number].fp32_largest or 0.0) * 1024 > 65504
    assert skip_causes(made, None, evidence) == {7: SkipCause.SPIKE}
    assert skip_causes(made) == {7: SkipCause.UNCLEAR}


def test_a_nan_that_no_scale_mends_is_no_calibration() -> None:
    """As torch's scaler goes on when every 7th batch has a NaN: each skip halves the scale."""
    made = [(2.0 ** (10 - n // 7), n % 7 == 6, 1.0) for n in range(40)]
    assert list(skip_causes(steps(*made)).values()) == ["unclear"] * 5


def test_a_long_descent_in_the_middle_of_a_training_is_no_calibration() -> None:
    """40 steps are taken at 2^31; then gradients overflow until the scale is 2^7, 24 steps on."""
    scales = [31] * 40 + list(range(31, 7, -1)) + [7] * 30
    made = [(2.0**e, 40 <= n < 64, 1.0) for n, e in enumerate(scales)]
    assert set(skip_causes(steps(*made)).values()) == {SkipCause.UNCLEAR}
    # The same descent at the start is the search.
    assert set(skip_causes(steps(*made[40:])).values()) == {SkipCause.CALIBRATION}


def test_optimizers_that_share_a_scaler_are_told_apart() -> None:
    """The first overflows down to 2^13, the second is finite at every scale."""
    made = [
        pair
        for exponent in (16, 15, 14, 13, 13)
        for pair in ((2.0**exponent, exponent > 13, 1.0), (2.0**exponent, False, 1.0))
    ]
    whose = {n: f"optimizer{n % 2}" for n in range(len(made))}
    assert skip_causes(steps(*made), whose) == dict.fromkeys((0, 2, 4), SkipCause.CALIBRATION)
    assert skip_causes(steps(*made)) == dict.fromkeys((0, 2, 4), SkipCause.UNCLEAR)


def test_counted() -> None:
    found = {0: SkipCause.CALIBRATION, 1: SkipCause.CALIBRATION, 9: SkipCause.FAULT}
    assert counted(found) == "2 calibrations, 1 fault"
    assert counted({}) == ""


def window(low: int, high: int) -> ScaleWindow:
    return ScaleWindow(low, high, 0, 0, ())


def test_the_first_scale_is_the_lowest_ceiling() -> None:
    given = advise([window(3, 17), window(3, 15), window(3, 16)])
    assert given is not None
    assert (given.initial_scale, given.growth_interval) == (2.0**15, 2000)


def test_gradients_that_shrink_want_a_shorter_interval() -> None:
    given = advise([window(0, 10 + n // 40) for n in range(401)])
    assert given is not None
    assert given.initial_scale == 2.0**10
    assert given.growth_interval == 40  # one doubling in 40 steps
    assert "halve in about 40 steps" in given.interval_reason
    thinned = advise([window(0, 10 + n // 4) for n in range(41)], steps_between=10)
    assert thinned is not None
    assert thinned.growth_interval == 41


def test_nothing_is_advised_without_a_window_and_a_huge_scale_never() -> None:
    assert advise([]) is None
    given = advise([window(0, 60)])
    assert given is not None
    assert given.initial_scale == 2.0**24


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        ([2.0**16], 2.0**15),
        ([2.0**16, 2.0**13, 2.0**14], 2.0**12),
        ([1.5 * 2.0**13], 2.0**13),
        ([2.0**18], 2.0**17),  # as the histograms have it
        ([], 2.0**17),
    ],
)
def test_no_scale_is_advised_at_which_the_run_skipped(
    skipped: list[float], expected: float
) -> None:
    given = advise([window(3, 17)], skipped=skipped)
    assert given is not None
    assert given.initial_scale == expected
    assert ("skipped a step" in given.scale_reason) == (expected < 2.0**17)


def test_nothing_is_advised_where_no_scale_helped() -> None:
    assert advise([window(3, 17)], skipped=[2.0, 1.0, 0.5]) is None


def test_a_loss_that_is_not_finite_says_nothing_of_the_scale() -> None:
    made = steps((8.0, True, math.nan), (4.0, True, 1.0), (2.0, False, 1.0))
    assert skipped_scales(made) == [4.0]
