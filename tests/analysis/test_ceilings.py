"""Which dtypes fall behind, and why: a firing, a near-miss and a not-applicable case each."""

from __future__ import annotations

import pytest

from ampscope.analysis import bench
from ampscope.analysis.bench import bench_view
from ampscope.analysis.ceilings import (
    Ceiling,
    Chip,
    ceilings,
    copy_rate,
    held_down,
    low_everywhere,
    shared,
    vendor_figures,
)
from ampscope.hardware.capability import tensor_cores
from ampscope.number_words import bytes_words, rate_words
from ampscope.records import Machine, Rate, RunInfo, RunSpec, Sample, State
from tests.helpers.hardware_reports import report
from tests.helpers.made_rates import aligned, ceilings_of, made

A100_NAME, T4_NAME = "NVIDIA A100-SXM4-40GB", "Tesla T4"
A100 = Chip(vendor_figures(A100_NAME), tensor_cores("8.0", A100_NAME))
T4 = Chip(vendor_figures(T4_NAME), tensor_cores("7.5", T4_NAME))
# What an A100 reaches, in TFLOP/s, about 80 % of its datasheet.
GOOD = {"fp64": 16.0, "fp32": 17.0, "tf32": 125.0, "bf16": 250.0, "fp16": 250.0, "int8": 480.0}


def of(found: list[Ceiling], dtype: str) -> Ceiling:
    return next(c for c in found if c.dtype == dtype)


def behind(found: list[Ceiling]) -> list[str]:
    return [c.dtype for c in found if c.reason]


def sample(reasons: str = "", device: str = "cuda:0") -> Sample:
    return Sample(device=device, at=0.0, clock_reasons=reasons)


def test_a_healthy_gpu_has_no_flag_and_its_shares_are_of_the_datasheet() -> None:
    found = ceilings(ceilings_of(GOOD), A100)
    assert behind(found) == []
    assert of(found, "bf16").share == pytest.approx(250 / 312)
    assert [c.dtype for c in found] == list(GOOD)  # from wide to narrow


def test_half_of_what_the_neighbours_suggest_is_the_limit() -> None:
    """The others reach 80 % of the datasheet: of tf32's 156 that suggests about 125."""
    near = ceilings(ceilings_of({**GOOD, "tf32": 66.0}), A100)
    under = ceilings(ceilings_of({**GOOD, "tf32": 60.0}), A100)
    assert behind(near) == []
    assert behind(under) == ["tf32"]


def test_tf32_as_slow_as_fp32_is_a_wrong_flag() -> None:
    found = ceilings(ceilings_of({**GOOD, "tf32": 17.1}), A100)
    assert behind(found) == ["tf32"]
    assert "TF32 flag had no effect" in of(found, "tf32").reason


def test_slow_tf32_that_is_faster_than_fp32_is_no_wrong_flag() -> None:
    found = ceilings(ceilings_of({**GOOD, "tf32": 40.0}), A100)
    assert of(found, "tf32").reason.startswith("Unknown")


def test_a_dtype_without_tensor_cores_is_named() -> None:
    """Turing multiplies fp16 and int8 there, and not bf16."""
    found = ceilings(ceilings_of({"fp32": 6.5, "bf16": 2.0, "fp16": 45.0, "int8": 90.0}), T4)
    assert behind(found) == ["bf16"]
    assert "no Tensor Core path for bf16" in of(found, "bf16").reason
    assert "7.5" in of(found, "bf16").reason


def test_clocks_are_the_reason_when_the_readings_say_so() -> None:
    slow = ceilings_of({**GOOD, "fp16": 60.0})
    held = timed_samples(["power cap"] * 3 + ["idle"] * 8)
    rarely = timed_samples(["idle"] * 50 + ["power cap"])
    assert "power cap in 20% of the time" in of(ceilings(slow, A100, held), "fp16").reason
    assert of(ceilings(slow, A100, rarely), "fp16").reason.startswith("Unknown")
    assert of(ceilings(slow, A100, []), "fp16").reason.startswith("Unknown")


def timed_samples(reasons: list[str]) -> list[Sample]:
    """A second apart; the first speaks for no time."""
    return [Sample("cuda:0", float(n), clock_reasons=r) for n, r in enumerate(reasons)]


def test_idleness_is_no_throttling() -> None:
    assert held_down(timed_samples(["idle"] * 5)) == ""
    assert held_down([]) == ""
    said = held_down(timed_samples(["idle,hardware slowdown"] * 3))
    assert said == "The clocks of cuda:0 were held down: hardware slowdown in 100% of the time."


def cpu_use(*pairs: tuple[float | None, float | None]) -> list[Sample]:
    return [
        Sample("cpu", float(n), busy_percent=busy, own_percent=own)
        for n, (busy, own) in enumerate(pairs)
    ]


def test_others_on_the_cpu_are_named_from_ten_percent_on() -> None:
    busy = cpu_use((None, None), (100.0, 40.0), (100.0, 40.0), (100.0, 100.0))
    assert shared(busy).startswith("Other processes used 40 % of the CPU meanwhile")
    assert shared(cpu_use((0.0, 0.0), (100.0, 91.0), (50.0, 55.0))) == ""
    assert shared(cpu_use((None, None))) == shared([]) == ""


def test_others_on_the_gpu_are_named() -> None:
    held = [Sample("cuda:0", 0.0, other_processes=n) for n in (1, 2, 0)]
    assert "held memory on cuda:0" in shared(held)
    assert shared([Sample("cuda:0", 0.0, other_processes=0)]) == ""
    assert shared([Sample("cuda:0", 0.0)]) == ""  # NVML does not say


def test_all_dtypes_low_is_no_dtype_behind() -> None:
    slow = ceilings(ceilings_of({d: 0.5 * t for d, t in GOOD.items()}), A100)
    assert behind(slow) == []
    assert low_everywhere(slow)
    assert not low_everywhere(ceilings(ceilings_of(GOOD), A100))
    assert not low_everywhere(ceilings(ceilings_of(GOOD), Chip()))  # no figures to be low against


# An AMD EPYC with AVX512-BF16 in GFLOP/s, as measured: fp16 has no instructions.
CPU_GIGA = {"fp64": 80.0, "fp32": 160.0, "bf16": 380.0, "fp16": 3.0, "int8": 700.0}


def cpu(*flags: str) -> Chip:
    return Chip(cpu_flags=flags, is_cpu=True)


def giga(rates: dict[str, float]) -> list[Rate]:
    return ceilings_of({d: g / 1000 for d, g in rates.items()})


def test_a_cpu_without_fp16_instructions() -> None:
    found = ceilings(giga(CPU_GIGA), cpu("AVX512-BF16"))
    assert behind(found) == ["fp16"]
    assert "no instruction that multiplies fp16" in of(found, "fp16").reason
    assert "AVX512-FP16" in of(found, "fp16").reason
    assert all(c.share is None and c.vendor_flops_s is None for c in found)


def test_a_cpu_whose_instructions_are_there_and_are_not_used() -> None:
    found = ceilings(giga(CPU_GIGA), cpu("AVX512-BF16", "AVX512-FP16"))
    assert "AVX512-FP16" in of(found, "fp16").reason
    assert of(found, "fp16").reason.startswith("Unknown")


def test_a_cpu_whose_flags_cannot_be_read() -> None:
    found = ceilings(giga(CPU_GIGA), Chip(is_cpu=True))
    assert "cannot be read" in of(found, "fp16").reason


def test_a_narrow_dtype_as_fast_as_a_wide_one_is_not_behind() -> None:
    same = giga({"fp32": 160.0, "bf16": 150.0, "fp16": 155.0})
    assert behind(ceilings(same, cpu())) == []


def test_fp64_is_not_judged_without_the_vendors_figure() -> None:
    assert behind(ceilings(ceilings_of({"fp64": 0.4, "fp32": 30.0}), Chip())) == []


def test_a_dtype_that_stopped_at_a_small_size_is_held_against_others_at_that_size() -> None:
    """At 256 all are slow; that bf16 reaches more at 2048 says nothing about fp16 at 256."""
    small, large = (256, 256, 256), (2048, 2048, 2048)
    rates = [
        made("fp32", 50e9, small),
        made("bf16", 60e9, small),
        made("bf16", 400e9, large),
        made("fp16", 40e9, small),
        made("fp16", None, large, note="Left out: too slow."),
    ]
    found = ceilings(rates, cpu())
    assert behind(found) == []
    assert of(found, "fp16").expected_flops_s == pytest.approx(60e9)
    assert of(found, "fp16").note == "Left out: too slow."


def test_what_was_not_measured_has_a_note_and_no_figure() -> None:
    rates = [*ceilings_of({"fp32": 1.0}), *ceilings_of({"tf32": None}, note="Not on a CPU.")]
    absent = of(ceilings(rates, Chip()), "tf32")
    assert (absent.best, absent.flops_s, absent.reason) == (None, None, "")
    assert absent.note == "Not on a CPU."


def test_copies_count_by_their_largest_block() -> None:
    cached = Rate("copy", "copy", "fp32", (8,), 0, 64, made("fp32", 1e12).timing, 0.0)
    memory = Rate("copy", "copy", "fp32", (80,), 0, 640, made("fp32", 1e12).timing, 0.0)
    assert copy_rate([cached, memory]) is memory
    assert copy_rate(ceilings_of(GOOD)) is None


def test_a_misaligned_size_that_costs() -> None:
    times = {4088: 1.0, 4089: 2.2, 4096: 1.0, 4097: 2.3, 4104: 1.0, 4105: 2.4, 4100: 1.05}
    found = bench.costs_of(aligned("align_k", times))
    said = bench.sentence(found)
    assert said.startswith("K = 4097 costs 2.3 times the time that K = 4096 costs")
    assert "fp16; 2.20 to 2.40" in said


def test_a_misaligned_size_under_ten_percent_is_noise() -> None:
    found = bench.costs_of(aligned("align_n", {4096: 1.0, 4097: 1.09}))
    assert bench.worst(found) is None
    assert bench.sentence(found).startswith("No misaligned size costs ten percent")
    assert bench.sentence(found).endswith("the time of 4096 for each multiplication.")


def test_a_misaligned_size_whose_quartiles_overlap_is_noise() -> None:
    found = bench.costs_of(aligned("align_m", {4096: 1.0, 4097: 1.3}, spread=0.5))
    assert found[0].ratio == pytest.approx(1.3)
    assert bench.worst(found) is None
    assert bench.sentence(found).endswith("which their quartiles do not tell apart.")


def test_more_channels_may_take_more_time() -> None:
    """Twice the channels, twice the multiplications: no cost. Time is compared for each of them."""
    rates = aligned("align_channels", {64: 1.0, 68: 1.0}, layout="NCHW")
    assert rates[1].timing is not None
    assert rates[0].timing is not None
    assert rates[1].timing.median_s > rates[0].timing.median_s
    assert bench.costs_of(rates)[0].ratio == pytest.approx(1.0)


def test_the_halves_come_before_fp32() -> None:
    """fp32 is there for contrast; its cost is said where the halves have none."""
    dear = aligned("align_k", {512: 1.0, 513: 1.9}, dtype="fp32")
    half = aligned("align_channels", {64: 1.0, 65: 1.2}, dtype="bf16", layout="NCHW")
    both = bench.sentence(bench.costs_of([*dear, *half]))
    assert both.startswith("A convolution of 65 channels costs 1.2 times the time that a convol")
    assert "(bf16, NCHW; " in both
    assert bench.sentence(bench.costs_of(dear)).startswith("K = 513 costs 1.9")


def test_without_misaligned_sizes_nothing_is_said() -> None:
    assert bench.sentence(bench.costs_of(ceilings_of(GOOD))) == ""


def run_on(device: str, name: str, capability: str = "", torch: str = "2.13.0") -> RunInfo:
    return RunInfo(
        id="r", spec=RunSpec(workload="", kind="bench"), state=State.FINISHED, created=0.0,
        started=0.0, ended=30.0, heartbeat=30.0, pid=1,
        machine=Machine(device, name, "native", capability, torch),
        message="", traceback="", steps_done=9, overhead_share=None,
    )  # fmt: skip


def test_the_sentence_says_what_half_precision_gives() -> None:
    view = bench_view(run_on("cpu", "Some CPU, 2 cores"), giga(CPU_GIGA), (), report())
    assert "bf16 matmuls run 2.4 times as fast as fp32's (380 GFLOP/s)" in view.sentence
    assert "fp16 matmuls run 53 times slower than fp32's (3 GFLOP/s)" in view.sentence
    assert any("no instruction that multiplies fp16" in text for text in view.warnings)
    assert "unknown" in view.vendor_sentence


def test_flags_of_another_machines_cpu_are_not_used() -> None:
    view = bench_view(run_on("cpu", "Other CPU, 8 cores"), giga(CPU_GIGA), (), report())
    assert any("cannot be read" in text for text in view.warnings)


def test_a_slice_an_amd_gpu_and_a_whole_gpu() -> None:
    rates = ceilings_of(GOOD)
    whole = bench_view(run_on("cuda:0", A100_NAME, "8.0"), rates)
    part = bench_view(run_on("cuda:0", f"{A100_NAME} MIG 1g.5gb", "8.0"), rates)
    amd = bench_view(run_on("cuda:0", "AMD Instinct MI300X", "9.4", "2.13.0+rocm7.0"), rates)
    other = bench_view(run_on("cuda:0", "AMD Instinct MI250X", "9.0", "2.13.0+rocm7.0"), rates)
    assert whole.ceilings[3].share == pytest.approx(250 / 312)
    assert "A100 datasheet" in whole.vendor_sentence
    assert "MIG slice" in part.vendor_sentence
    assert amd.ceilings[3].share == pytest.approx(250 / 1307.4)
    assert "MI300X data sheet" in amd.vendor_sentence
    assert "ROCm" in other.vendor_sentence
    assert all(c.share is None for c in (*part.ceilings, *other.ceilings))


def test_held_clocks_are_said_even_where_no_dtype_is_behind() -> None:
    readings = timed_samples(["power cap"] * 4)
    view = bench_view(run_on("cuda:0", A100_NAME, "8.0"), ceilings_of(GOOD), readings)
    assert view.warnings == (held_down(readings),)


def test_rates_in_words() -> None:
    assert rate_words(3.15e9) == "3.15 GFLOP/s"
    assert rate_words(312e12) == "312 TFLOP/s"
    assert rate_words(2.25e15) == "2,250 TFLOP/s"
    assert bytes_words(29.4e9) == "29.4 GB/s"
    assert bytes_words(2.65e12) == "2,650 GB/s"
    assert rate_words(None) == bytes_words(None) == "not measured"
