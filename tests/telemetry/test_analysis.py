"""What readings say about a run: sums by hand, and what spoils a comparison: firing, near miss, not
applicable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampscope.analysis.telemetry import (
    LEAST_SHARE,
    OTHERS_PERCENT,
    by_device,
    held_back,
    spoiled,
    steps_at,
    usage,
    within,
)
from ampscope.records import Sample, StepRecord
from ampscope.store.samples import COLUMNS, QUANTITIES, Row, of_devices, overview, row_of, thinned
from ampscope.telemetry.sampler import STAGES, stage
from tests.helpers.telemetry_samples import BEGIN, EVERY_S, GIB, cpu, gpu, throttled


def test_sums_are_weighted_with_the_time_that_a_reading_speaks_for() -> None:
    """Busy 100 % for 1 s, then 0 % for 3 s, is 25 %; the first reading speaks for no time."""
    at = (0.0, 1.0, 4.0)
    samples = [
        Sample("cpu", t, busy_percent=b, own_percent=o, energy_j=e, memory_used_bytes=m)
        for t, b, o, e, m in zip(at, (77, 100, 0), (5, 80, 0), (9, 30, 50), (3, 2, 1), strict=True)
    ]
    used = usage(samples)
    assert (used.busy_percent, used.own_percent, used.others_percent) == (25.0, 20.0, 5.0)
    assert (used.seconds, used.readings, used.energy_j, used.memory_bytes) == (4.0, 3, 41, 3)
    assert (used.power_w, used.clock_mhz, used.clock_range_mhz) == (None, None, None)


def test_a_machine_that_slept_counts_for_a_minute_at_most() -> None:
    samples = [Sample("cpu", at, busy_percent=b) for at, b in ((0, 0), (60, 0), (36_060, 100))]
    assert usage(samples).busy_percent == 50.0


def test_an_undisturbed_run_is_not_spoiled() -> None:
    assert spoiled([*gpu(10), *cpu(10)]) == ()
    assert spoiled([]) == ()


@pytest.mark.parametrize(
    "reason",
    ["power cap", "hardware slowdown", "software thermal slowdown", "hardware thermal slowdown"],
)
def test_throttling_is_named_with_its_share_and_clocks(reason: str) -> None:
    """80 intervals of which 20 are held back: a quarter."""
    samples = throttled(gpu(10), f"sync boost,{reason}", 30, 50)
    assert spoiled(samples) == (
        f"cuda:0 was held back: {reason} in 25.0 % of the time (clock 1,410 to 1,980 MHz).",
    )


def test_several_reasons_are_ranked() -> None:
    samples = throttled(throttled(gpu(10), "power cap", 1, 17), "hardware slowdown", 20, 60)
    assert list(held_back(samples).items()) == [("hardware slowdown", 0.5), ("power cap", 0.2)]


def test_throttling_just_under_its_bound_says_nothing() -> None:
    """1,000 intervals: 49 are 4.9 %, 51 are 5.1 %."""
    long = gpu(125)
    assert LEAST_SHARE == 0.05
    assert spoiled(throttled(long, "power cap", 100, 149)) == ()
    assert len(spoiled(throttled(long, "power cap", 100, 151))) == 1


@pytest.mark.parametrize("setting", ["application clocks setting", "sync boost", "idle", ""])
def test_a_setting_is_no_throttling(setting: str) -> None:
    assert spoiled(throttled(gpu(10), setting, 0, 81)) == ()


def test_a_shared_gpu_is_named() -> None:
    """From interval 41 on two others hold 3 GiB between them."""
    samples = [
        replace(s, other_processes=2, memory_used_bytes=14 * GIB) if n > 40 else s
        for n, s in enumerate(gpu(10))
    ]
    assert spoiled(samples) == (
        "cuda:0 was shared: 2 other processes held memory on it in 50.0 % of the time, up to "
        "3,072 MiB beside the run's own.",
    )


def test_a_short_visitor_and_an_unknown_number_are_no_sharing() -> None:
    visited = [replace(s, other_processes=1) if n < 4 else s for n, s in enumerate(gpu(10))]
    assert spoiled(visited) == ()  # 3 of 80 intervals
    assert spoiled([replace(s, other_processes=None) for s in gpu(10)]) == ()


def test_a_cpu_loaded_by_others() -> None:
    assert spoiled(cpu(10, busy=96.0, own=72.5)) == (
        "The CPU was shared: other processes took 23.5 % of it, the run 72.5 %.",
    )
    assert OTHERS_PERCENT == 10.0
    assert len(spoiled(cpu(10, busy=60.0, own=50.0))) == 1
    assert spoiled(cpu(10, busy=60.0, own=50.1)) == ()


def test_a_cpu_under_a_quota() -> None:
    (sentence,) = spoiled(throttled(cpu(10), "CPU quota", 1, 81))
    assert sentence.startswith("The CPU was held back: CPU quota in 100.0 % of the time")


def test_what_cannot_be_judged_is_not_judged() -> None:
    assert spoiled(cpu(0.875, busy=90.0, own=1.0)) == ()  # under a second
    assert spoiled([replace(s, own_percent=None) for s in cpu(10, own=1.0)]) == ()
    assert spoiled([replace(s, busy_percent=None) for s in cpu(10, own=1.0)]) == ()


def test_a_part_of_a_run_can_be_judged_alone() -> None:
    samples = throttled(gpu(10), "power cap", 1, 17)
    assert len(spoiled(within(samples, BEGIN, BEGIN + 2))) == 1
    assert spoiled(within(samples, BEGIN + 4, BEGIN + 9)) == ()


def test_gpus_come_before_the_cpu() -> None:
    second = [replace(s, device="cuda:1") for s in gpu(1)]
    assert list(by_device([*cpu(1), *second, *gpu(1)])) == ["cuda:0", "cuda:1", "cpu"]


def step(number: int, ended_at: float | None) -> StepRecord:
    return StepRecord(
        step=number, loss=1.0, scale=None, growth_counter=None, skipped=False, grad_norm=None,
        lr=None, step_time_s=1.0, overhead_s=None, peak_bytes=None, moved_share=None, op_set=None,
        ended_at=ended_at,
    )  # fmt: skip


def test_the_step_under_way() -> None:
    """Steps 0, 1, 2 end at 10, 11, 12 and take 1 s; of 3 to 9 only the last one is given."""
    steps = [step(0, 10.0), step(1, 11.0), step(2, 12.0), step(10, 20.0)]
    at = [8.9, 9.0, 10.0, 10.1, 11.9, 16.0, 20.0, 20.1]
    found = steps_at([Sample("cpu", t) for t in at], steps)
    assert found == [None, 0, 0, 1, 2, 6, 10, None]
    assert steps_at([Sample("cpu", 5.0)], [step(0, None)]) == [None]


def rows(values: list[float | None]) -> list[Row]:
    return [row_of("cpu", n * EVERY_S, {"power_w": value}) for n, value in enumerate(values)]


POWER = COLUMNS.index("power_w")
SERIES = st.lists(st.one_of(st.none(), st.floats(0, 1e3)), max_size=400)


@given(SERIES, st.integers(1, 300))
def test_an_overview_keeps_extremes_and_invents_nothing(
    values: list[float | None], points: int
) -> None:
    full = rows(values)
    few = overview(full, points)
    assert set(few) <= set(full)
    assert [row[1] for row in few] == sorted(row[1] for row in few)
    assert len(few) <= max(points, 4 * len(QUANTITIES))
    known = [value for value in values if value is not None]
    kept = [row[POWER] for row in few if row[POWER] is not None]
    if known:
        assert (min(kept), max(kept)) == (min(known), max(known))


@given(SERIES, st.integers(1, 20))
def test_thinning_keeps_some_at_regular_distance(values: list[float | None], count: int) -> None:
    full = rows(values)
    kept = [full.index(row) for row in thinned(full, count)]
    distance = -(-len(full) // count)
    assert all(b - a <= distance for a, b in zip([0, *kept], [*kept, len(full)], strict=True))


def test_what_holds_clocks_down_is_never_thinned_away() -> None:
    full = [row_of("gpu", n, {"clock_reasons": "power cap" if n == 77 else ""}) for n in range(100)]
    assert full[77] in thinned(full, 3)
    assert thinned(full, 0) == full


def test_devices_are_thinned_apart() -> None:
    both = sorted([*rows([1.0] * 500), *(("cuda:0", *row[1:]) for row in rows([2.0] * 500))])
    found = of_devices(both, 100)
    assert {row[0] for row in found} == {"cpu", "cuda:0"}
    assert found == sorted(found, key=lambda row: (row[1], row[0]))
    assert of_devices(both, 0) == both


def test_a_week_is_bounded() -> None:
    """Half an hour whole; then per window what is regular and at most two rows a quantity."""
    assert stage(0) == (1.0, 0)
    assert stage(1800) == (60.0, 6)
    assert stage(90_000) == (600.0, 10)
    extremes = 2 * len(QUANTITIES)
    total = STAGES[0][0] / 0.1
    total += (STAGES[1][0] - STAGES[0][0]) / 60 * (6 + extremes)
    total += (7 * 86400 - STAGES[1][0]) / 600 * (10 + extremes)
    assert total < 100_000
