"""The bench's own arithmetic and order, against torch's FLOP counter and calls that count."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ampscope.errors import Cancelled
from ampscope.measure import rates as alignment
from ampscope.measure import rates as bench
from ampscope.measure import rates as square_matmuls
from ampscope.measure.matmuls import (
    OPERANDS,
    flops,
    matmul,
    matmul_rate,
    moved_bytes,
    random_tensor,
    refusal,
)
from ampscope.measure.rates import LEAST, SIZES, copies, first_time, interleaved
from ampscope.records import Rate, RunSpec, Timing
from ampscope.runner.device import describe
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

CPU = torch.device("cpu")
SPEC = RunSpec(workload="", kind="bench", device="cpu")
NEVER = lambda: False  # noqa: E731  # as short as what it says


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    return RunWriter.create(tmp_path / "runs.db", SPEC)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16", "int8", "e4m3"])
def test_a_matmul_multiplies_in_its_dtype(dtype: str) -> None:
    shape = (32, 48, 64)
    result = matmul(dtype, shape, CPU)()
    assert isinstance(result, torch.Tensor)
    assert result.shape == (32, 48)
    written = {"int8": torch.int32, "e4m3": torch.bfloat16}.get(dtype, OPERANDS[dtype])
    assert result.dtype == written
    values = result.to(torch.float64)
    assert values.isfinite().all()
    assert values.std() > 1  # sums of 64 random matmuls, not zeros


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "e4m3"])
def test_flops_are_those_that_torch_counts(dtype: str) -> None:
    shape = (32, 48, 64)
    call = matmul(dtype, shape, CPU)
    with FlopCounterMode(display=False) as counter:
        call()
    counted = counter.get_total_flops()
    assert counted in (0, flops(shape))  # torch counts no _int_mm before 2.13
    assert counted or dtype == "int8"


def test_a_convolutions_flops_are_those_that_torch_counts() -> None:
    base = alignment.ConvShape(2, 16, 12, 24)
    call = alignment.convolution("fp32", "NCHW", base, 17, CPU)
    with FlopCounterMode(display=False) as counter:
        call()
    record = alignment._conv_rate("fp32", "NCHW", base, 17, Timing(1.0, 1.0, 1.0, 5))
    assert record.flops == counter.get_total_flops()
    assert record.shape == (2, 17, 12, 12, 24)


def test_moved_bytes_count_each_operand_once() -> None:
    m, n, k = 3, 5, 7
    assert moved_bytes("fp32", (m, n, k)) == 4 * (m * k + k * n + m * n)
    assert moved_bytes("int8", (m, n, k)) == (m * k + k * n) + 4 * m * n  # sums are int32
    assert moved_bytes("e4m3", (m, n, k)) == (m * k + k * n) + 2 * m * n  # written as bf16


def test_random_int8_has_all_values_and_fp8_is_finite() -> None:
    assert random_tensor((100_000,), torch.int8, CPU).unique().numel() == 256
    assert random_tensor((1000,), torch.float8_e4m3fn, CPU).float().isfinite().all()


def test_a_measurement_is_never_a_rehearsal() -> None:
    assert describe(SPEC, CPU).policy == "native"
    assert describe(RunSpec("gpt"), CPU).policy == "rehearsal"


def test_tf32_is_refused_on_a_cpu() -> None:
    assert "Tensor Cores" in refusal("tf32", CPU)
    assert refusal("bf16", CPU) == ""


def test_the_rate_is_that_of_a_plain_loop() -> None:
    """Within a factor of five on a machine that does other things: units and counts are right."""
    n = 256
    call = matmul("fp32", (n, n, n), CPU)
    a, b = torch.randn(n, n), torch.randn(n, n)
    ratios = []
    for _ in range(5):  # the best of five: the machine may pause either of the two
        timing = interleaved([(call, first_time(call, CPU))], CPU, 0.2, NEVER)[0]
        found = []
        for _ in range(50):
            started = time.perf_counter()
            torch.mm(a, b)
            found.append(time.perf_counter() - started)
        ratios.append(timing.median_s / sorted(found)[25])
    assert any(0.2 < ratio < 5 for ratio in ratios)
    assert timing.low_s <= timing.median_s <= timing.high_s


def test_calls_take_turns() -> None:
    order: list[str] = []
    slow = 0.02  # longer than a turn, so that each turn is one call
    calls = [(lambda: order.append("a"), slow), (lambda: order.append("b"), slow)]
    timings = interleaved(calls, CPU, 0.0, NEVER)
    assert order == ["a", "b"] * LEAST
    assert [t.repeats for t in timings] == [LEAST, LEAST]


def test_a_fast_call_is_made_several_times_a_turn() -> None:
    order: list[str] = []
    calls = [(lambda: order.append("a"), 0.002), (lambda: order.append("b"), 0.02)]
    interleaved(calls, CPU, 0.0, NEVER)
    assert "".join(order) == ("a" * 5 + "b") * LEAST  # 10 ms of a, then b


def test_it_stops_between_two_turns() -> None:
    made: list[int] = []
    with pytest.raises(Cancelled):
        interleaved([(lambda: made.append(1), 0.02)], CPU, 9.0, lambda: len(made) >= 2)
    assert len(made) == 2


def test_a_slow_dtype_is_left_out_before_it_is_called(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 takes 0.1 s at 256; at 512 it would be eight times that, seven times over."""
    made: list[tuple[str, int]] = []

    def pretended(dtype: str, shape: tuple[int, int, int], _: torch.device) -> object:
        made.append((dtype, shape[0]))
        return lambda: None

    def seconds(_: object, __: torch.device) -> float:
        dtype, size = made[-1]
        return (0.1 if dtype == "fp16" else 0.001) * (size / 256) ** 3

    def turns(calls: list[tuple[object, float]], *_: object) -> list[Timing]:
        return [Timing(s, s, s, 7) for _, s in calls]

    monkeypatch.setattr(square_matmuls, "matmul", pretended)
    monkeypatch.setattr(square_matmuls, "first_time", seconds)
    monkeypatch.setattr(square_matmuls, "interleaved", turns)
    effort = square_matmuls.Effort((256, 512, 1024), 1.0, 2.0)
    rates = square_matmuls.square_matmuls(effort, CPU, writer, NEVER)
    assert ("fp16", 256) in made
    assert not {("fp16", 512), ("fp16", 1024)} & set(made)
    left = [r for r in rates if r.dtype == "fp16" and r.timing is None]
    assert [r.shape[0] for r in left] == [512, 1024]
    assert "5.6 s" in left[0].note
    assert [r.shape[0] for r in rates if r.dtype == "fp32" and r.timing] == [256, 512, 1024]
    assert [r.note for r in rates if r.dtype == "tf32"] == [refusal("tf32", CPU)]  # said once


def test_a_matmul_that_torch_refuses_has_torchs_reason(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = square_matmuls.matmul

    def refusing(dtype: str, shape: tuple[int, int, int], device: torch.device) -> object:
        if dtype == "e4m3":
            raise RuntimeError("torch._scaled_mm is only supported elsewhere\nmore lines")
        if dtype == "bf16":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return whole(dtype, shape, device)

    monkeypatch.setattr(square_matmuls, "matmul", refusing)
    effort = square_matmuls.Effort((64,), 0.05, 1.0)
    rates = square_matmuls.square_matmuls(effort, CPU, writer, NEVER)
    notes = {r.dtype: r.note for r in rates if r.timing is None}
    assert notes["e4m3"] == "torch._scaled_mm is only supported elsewhere"
    assert "not enough free memory" in notes["bf16"]
    said = bench.absence(rates)
    assert "Not measured: e4m3. torch._scaled_mm" in said
    assert "fp32" not in said


def test_copies_count_what_is_read_and_written(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "cpu", (2**16, 2**20))
    found = copies(CPU, 0.1, writer, NEVER)
    assert [r.moved_bytes for r in found] == [2**17, 2**21]
    assert all(r.bytes_s and r.bytes_s > 1e6 for r in found)  # however busy the machine
    assert [r.shape for r in found] == [(2**14,), (2**18,)]


def test_sizes_are_eight_n_and_zero_one_two_four() -> None:
    assert alignment.positions(512) == (
        *(504, 505, 506, 508),
        *(512, 513, 514, 516),
        *(520, 521, 522, 524),
    )


def ceiling(dtype: str, size: int, seconds: float | None) -> Rate:
    timing = Timing(seconds, seconds, seconds, 9) if seconds else None
    return matmul_rate("ceiling", dtype, (size, size, size), timing)


def test_one_dimension_is_misaligned_at_a_time(writer: RunWriter) -> None:
    rates = [ceiling("fp32", 64, 1e-4), ceiling("bf16", 64, 1e-4), ceiling("fp16", 64, None)]
    effort = alignment.AlignmentEffort((64,), 0.4)
    alignment.aligned_matmuls(effort, rates, CPU, writer, NEVER)
    writer.close()
    with Reader(writer.path) as reader:
        found = [r for r in reader.results(writer.run_id) if isinstance(r, Rate)]
    for axis, series in enumerate(("align_m", "align_n", "align_k")):
        shapes = [r.shape for r in found if r.series == series and r.dtype == "bf16"]
        assert [s[axis] for s in shapes] == list(alignment.positions(64))
        assert all(s[a] == 64 for s in shapes for a in range(3) if a != axis)
    assert [r.note for r in found if r.dtype == "fp16"] == [alignment.LEFT_OUT]


def test_the_size_is_the_largest_that_is_short() -> None:
    rates = [ceiling("fp32", 256, 0.001), ceiling("fp32", 512, 0.011), ceiling("fp32", 1024, 0.09)]
    assert alignment.chosen_size((256, 512, 1024), rates) == 512
    assert alignment.chosen_size((256, 512), rates[:1]) == 256
    assert alignment.chosen_size((256, 512), []) == 256


def test_convolutions_have_both_layouts(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(alignment.CONVOLUTIONS, "cpu", alignment.ConvShape(1, 16, 4, 8))
    effort = alignment.AlignmentEffort((64,), 10.0)  # a busy machine
    alignment.aligned_convolutions(effort, CPU, writer, NEVER)
    writer.close()
    with Reader(writer.path) as reader:
        found = [r for r in reader.results(writer.run_id) if isinstance(r, Rate)]
    for layout in ("NCHW", "channels_last"):
        of_layout = [r for r in found if r.layout == layout and r.dtype == "fp32"]
        assert [r.shape[1] for r in of_layout] == list(alignment.positions(16))
    call = alignment.convolution("fp32", "channels_last", alignment.ConvShape(1, 8, 4, 8), 8, CPU)
    result = call()
    assert result is None  # nothing is kept of a call


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_quick_bench_on_cuda_leaves_the_flag_as_it_was(writer: RunWriter) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    spec = RunSpec(workload="", kind="bench", device="cuda", args=("quick",))
    bench.measure(spec, torch.device("cuda:0"), writer, NEVER)
    writer.close()
    assert torch.backends.cuda.matmul.fp32_precision == before
    with Reader(writer.path) as reader:
        found = [r for r in reader.results(writer.run_id) if isinstance(r, Rate)]
    assert {r.dtype for r in found if r.series == "ceiling"} == set(OPERANDS)
    assert {r.series for r in found} >= {"ceiling", "copy", "align_k", "align_channels"}
