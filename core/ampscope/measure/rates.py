"""What this machine reaches: matmuls of every dtype, copies, and what a misaligned size costs.

The rates of one kind are measured interleaved (:class:`Timed`), on random data, each as the median
of many with its quartiles. A run with the argument ``quick`` takes a third of the time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ampscope.errors import Cancelled
from ampscope.measure.matmuls import (
    OPERANDS,
    Matrices,
    matmul,
    matmul_rate,
    random_tensor,
    refusal,
)
from ampscope.measure.timing import summary, synchronize, times
from ampscope.records import Rate, RunSpec, Timing
from ampscope.store.writer import RunWriter

QUICK = "quick"
WARM_UP_S = 1.0  # an idle GPU takes a few tenths of a second to raise its clocks
WARM_UP_SIZE = 4096
Call = Callable[[], object]
Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class RatePlan:
    """Everything of one run."""

    matmuls: Effort
    copy_s: float
    alignment: AlignmentEffort


@dataclass(frozen=True, slots=True)
class Effort:
    """How large and how long."""

    sizes: tuple[int, ...]
    budget_s: float  # for all dtypes at one size
    longest_s: float  # of the least number of calls of one dtype at one size


@dataclass(frozen=True, slots=True)
class AlignmentEffort:
    """Candidates for the size of a matmul, and seconds for matmuls and convolutions together."""

    sizes: tuple[int, ...]
    budget_s: float

    @property
    def longest_s(self) -> float:
        """Of one call: all sizes of one dtype, the least number of times, within their share."""
        return self.budget_s / (SHARES * len(PERIODS) * len(OFFSETS) * LEAST)


# On 2 cores of an AMD EPYC the whole takes about 30 s, and 10 s when it is quick.
CPU_SIZES, CUDA_SIZES = (256, 512, 1024, 2048), (512, 1024, 2048, 4096, 8192)
ALIGNED = {"cpu": (256, 512), "cuda": (1024, 2048, 4096)}
PLANS = {
    ("cpu", False): RatePlan(
        Effort(CPU_SIZES, 2.5, 3.0), 2.0, AlignmentEffort(ALIGNED["cpu"], 8.0)
    ),
    ("cpu", True): RatePlan(Effort(CPU_SIZES[:3], 1.0, 0.5), 0.8, AlignmentEffort((256,), 3.0)),
    ("cuda", False): RatePlan(
        Effort(CUDA_SIZES, 4.0, 3.0), 2.0, AlignmentEffort(ALIGNED["cuda"], 16.0)
    ),
    ("cuda", True): RatePlan(
        Effort(CUDA_SIZES[1:4], 1.0, 0.5), 0.8, AlignmentEffort(ALIGNED["cuda"][:2], 4.0)
    ),
}


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Measure and write; one sentence on what could not be measured. Raises Cancelled."""
    plan = PLANS[device.type, QUICK in spec.args]
    matmuls = torch.backends.cuda.matmul
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # set at import
    flags = matmuls.fp32_precision, convolutions.fp32_precision
    try:
        with torch.no_grad():
            warm_up(device)
            rates = square_matmuls(plan.matmuls, device, writer, is_cancelled)
            copies(device, plan.copy_s, writer, is_cancelled)
            aligned_matmuls(plan.alignment, rates, device, writer, is_cancelled)
            aligned_convolutions(plan.alignment, device, writer, is_cancelled)
    finally:
        matmuls.fp32_precision, convolutions.fp32_precision = flags
    return absence(rates)


def absence(rates: Sequence[Rate]) -> str:
    """Which dtypes were measured at no size, and why."""
    measured = {rate.dtype for rate in rates if rate.timing is not None}
    notes = {rate.dtype: rate.note for rate in rates if rate.dtype not in measured}
    return " ".join(f"Not measured: {dtype}. {note}" for dtype, note in notes.items())


def warm_up(device: torch.device) -> None:
    """Keep a GPU busy until its clocks are up; a CPU's first calls do that."""
    if device.type != "cuda" or refusal("fp16", device):
        return
    call = matmul("fp16", (WARM_UP_SIZE,) * 3, device)
    ends = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < ends:
        call()
        torch.cuda.synchronize(device)


SQUARE_SERIES = "ceiling"


def square_matmuls(
    effort: Effort, device: torch.device, writer: RunWriter, stop: Stop
) -> list[Rate]:
    """One rate a dtype and size, written as they come; those that cannot be have a note.

    Sizes rise. What a matmul will take is predicted from the size before, so that a dtype without
    instructions of its own (fp16 on most CPUs: 40 times slower than fp32) costs no more than the
    rest.
    """
    rates: list[Rate] = []
    seconds: dict[str, float] = {}  # of one matmul at the size before
    refused: dict[str, str] = {}
    for place, size in enumerate(effort.sizes):
        growth = (size / effort.sizes[place - 1]) ** 3 if place else 0.0
        found = _at_size(size, growth, effort, device, stop, seconds, refused)
        for rate in found:
            writer.add_result(rate)
        writer.flush()
        rates += found
    return rates


def _at_size(
    size: int,
    growth: float,
    effort: Effort,
    device: torch.device,
    stop: Stop,
    seconds: dict[str, float],
    refused: dict[str, str],
) -> list[Rate]:
    ready: list[tuple[str, Call, float]] = []
    notes: dict[str, str] = {}
    for dtype in OPERANDS:
        if dtype in refused:
            continue  # said once
        expected = seconds.get(dtype, 0.0) * growth
        if LEAST * expected > effort.longest_s:
            seconds[dtype] = expected
            notes[dtype] = (
                f"Left out: {LEAST} matmuls of this size would take about {LEAST * expected:.3g} "
                "s, by the rate of the size before."
            )
            continue
        try:
            call, took = _prepared(dtype, size, device)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            notes[dtype] = refused[dtype] = reason(error)
            continue
        ready.append((dtype, call, took))
    timings = interleaved([(call, took) for _, call, took in ready], device, effort.budget_s, stop)
    done = dict(zip((dtype for dtype, _, _ in ready), timings, strict=True))
    seconds |= {dtype: timing.median_s for dtype, timing in done.items()}
    return [
        matmul_rate(SQUARE_SERIES, dtype, (size, size, size), done.get(dtype), notes.get(dtype, ""))
        for dtype in OPERANDS
        if dtype in done or dtype in notes
    ]


def _prepared(dtype: str, size: int, device: torch.device) -> tuple[Call, float]:
    reason = refusal(dtype, device)
    if reason:
        raise NotImplementedError(reason)
    call = matmul(dtype, (size, size, size), device)
    return call, first_time(call, device)


def reason(error: Exception) -> str:
    """What torch says, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "There was not enough free memory on the device for its matrices."
    return str(error).strip().splitlines()[0][:200] or type(error).__name__


COPY_SERIES = "copy"
MIB = 2**20
# The largest is eight times the last cache of a large server CPU (32 MiB a core complex) and 20
# times that of an H100 (50 MiB): what it reaches is the memory's rate, not a cache's.
SIZES = {"cpu": (4 * MIB, 32 * MIB, 256 * MIB), "cuda": (16 * MIB, 128 * MIB, 1024 * MIB)}
FLOAT_BYTES = 4


def copies(device: torch.device, budget_s: float, writer: RunWriter, stop: Stop) -> list[Rate]:
    """How fast the device copies within its own memory, from a size that fits a cache upwards.
    Counted are bytes read plus bytes written; a CPU that also reads each line before it writes it
    moves half as much again, which is not counted."""
    rates = []
    for size in SIZES[device.type]:
        count = size // FLOAT_BYTES
        timing, note = None, ""
        try:
            source = torch.randn(count, device=device)
            target = torch.empty_like(source)
        except RuntimeError:
            note = f"There was no room for two blocks of {size // MIB} MiB."
        else:

            def call(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source)

            took = first_time(call, device)
            timing = interleaved([(call, took)], device, budget_s / len(SIZES), stop)[0]
        rates.append(
            Rate(COPY_SERIES, "copy", "fp32", (count,), 0, 2 * size, timing, time.time(), note=note)
        )
        writer.add_result(rates[-1])
    writer.flush()
    return rates


STEP, OFFSETS = 8, (0, 1, 2, 4)
PERIODS = (-1, 0, 1)  # n before, at and after the size: a cost must show at each to be one
DTYPES = ("fp16", "bf16", "fp32")  # fp32 for contrast: its 16 bytes are 4 numbers
ALIGNMENT_SERIES = {"m": "align_m", "n": "align_n", "k": "align_k"}
SHARES = 4  # of the time: three dimensions of a matmul, and convolutions
LEFT_OUT = "Left out: one alone takes so long that it would use up the time of the others."
LONGEST_S = 0.012  # of one matmul in fp32: 36 sizes in three dtypes and ten rounds of them


def positions(size: int) -> tuple[int, ...]:
    """``size`` is a multiple of 8: 8n + {0, 1, 2, 4} around it."""
    return tuple(size + STEP * n + offset for n in PERIODS for offset in OFFSETS)


def aligned_matmuls(
    effort: AlignmentEffort,
    ceilings: Sequence[Rate],
    device: torch.device,
    writer: RunWriter,
    stop: Stop,
) -> None:
    """What a misaligned size costs: each dimension in turn at 8n + {0, 1, 2, 4}, the others kept at
    a multiple of 8. The size and which dtypes take part follow from what was measured.

    Tensor Cores and vector units read 16 bytes at a time, which are 8 halves: rows that begin at
    other places are read in smaller pieces, or by other kernels.
    """
    size = chosen_size(effort.sizes, ceilings)
    expected = {dtype: _seconds_of_sizes(ceilings, dtype, size) for dtype in DTYPES}
    dtypes = [d for d in DTYPES if 0 < expected[d] <= effort.longest_s]
    for dtype in DTYPES:
        if dtype not in dtypes:
            writer.add_result(matmul_rate("align_k", dtype, (size, size, size), None, LEFT_OUT))
    for dimension, series in ALIGNMENT_SERIES.items():
        shapes = [
            (dtype, _shape(size, dimension, position))
            for dtype, position in itertools.product(dtypes, positions(size))
        ]
        matrices = Matrices(device)
        calls = [
            (matmul(dtype, shape, device, matrices), expected[dtype])
            for dtype, shape in reversed(shapes)  # the largest first
        ][::-1]
        timings = interleaved(calls, device, effort.budget_s / SHARES, stop)
        for (dtype, shape), timing in zip(shapes, timings, strict=True):
            writer.add_result(matmul_rate(series, dtype, shape, timing))
        writer.flush()


def chosen_size(sizes: Sequence[int], ceilings: Sequence[Rate]) -> int:
    """The largest at which an fp32 matmul is short enough to be made hundreds of times."""
    fitting = [s for s in sizes if 0 < _seconds_of_sizes(ceilings, "fp32", s) <= LONGEST_S]
    return max(fitting, default=min(sizes))


def _seconds_of_sizes(ceilings: Sequence[Rate], dtype: str, size: int) -> float:
    """Of one square matmul, as measured; 0 where it was not."""
    for found in ceilings:
        if found.dtype == dtype and found.shape[0] == size and found.timing is not None:
            return found.timing.median_s
    return 0.0


def _shape(size: int, dimension: str, position: int) -> tuple[int, int, int]:
    m, n, k = (position if name == dimension else size for name in ALIGNMENT_SERIES)
    return m, n, k


LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
KERNEL = 3  # height and width of a convolution's filters


@dataclass(frozen=True, slots=True)
class ConvShape:
    """(batch, channels, height, width) in, ``filters`` out."""

    batch: int
    channels: int
    side: int
    filters: int


# As large as a middle layer of a ResNet-50 (28 x 28); on a CPU small enough for a few milliseconds.
CONVOLUTIONS = {"cpu": ConvShape(8, 64, 28, 64), "cuda": ConvShape(64, 256, 28, 256)}


def aligned_convolutions(
    effort: AlignmentEffort, device: torch.device, writer: RunWriter, stop: Stop
) -> None:
    """Input channels at 8n + {0, 1, 2, 4}, in both layouts."""
    base = CONVOLUTIONS[device.type]
    kept: list[tuple[str, str, int]] = []
    calls: list[tuple[Call, float]] = []
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        found, note = _convolutions(dtype, layout, base, device, effort.longest_s)
        kept += [(dtype, layout, channels) for channels, _, _ in found]
        calls += [(call, took) for _, call, took in found]
        if note:
            writer.add_result(_conv_rate(dtype, layout, base, base.channels, None, note))
    timings = interleaved(calls, device, effort.budget_s / SHARES, stop)
    for (dtype, layout, channels), timing in zip(kept, timings, strict=True):
        writer.add_result(_conv_rate(dtype, layout, base, channels, timing))
    writer.flush()


def _convolutions(
    dtype: str, layout: str, base: ConvShape, device: torch.device, longest_s: float
) -> tuple[list[tuple[int, Call, float]], str]:
    """(channels, call, about how long it takes) of each, or why there are none."""
    found: list[tuple[int, Call, float]] = []
    for channels in positions(base.channels):
        try:
            call = convolution(dtype, layout, base, channels, device)
            took = first_time(call, device)
        except (RuntimeError, NotImplementedError) as error:
            return [], reason(error)
        if not found and took > longest_s:
            return [], LEFT_OUT
        found.append((channels, call, took))
    return found, ""


def convolution(
    dtype: str, layout: str, base: ConvShape, channels: int, device: torch.device
) -> Call:
    """A 3 x 3 convolution that keeps height and width; fp32 without TF32."""
    memory = LAYOUTS[layout]
    operand = OPERANDS[dtype]
    data = random_tensor((base.batch, channels, base.side, base.side), operand, device)
    data = data.to(memory_format=memory)
    weight = random_tensor((base.filters, channels, KERNEL, KERNEL), operand, device)
    weight = weight.to(memory_format=memory)

    def call() -> None:
        if device.type == "cuda":
            torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
        torch.conv2d(data, weight, padding=KERNEL // 2)

    return call


def _conv_rate(
    dtype: str, layout: str, base: ConvShape, channels: int, timing: Timing | None, note: str = ""
) -> Rate:
    shape = (base.batch, channels, base.side, base.side, base.filters)
    outputs = base.batch * base.side**2 * base.filters
    weights = base.filters * channels * KERNEL**2
    numbers = base.batch * channels * base.side**2 + weights + outputs
    return Rate(
        series="align_channels",
        op="conv2d",
        dtype=dtype,
        shape=shape,
        flops=2 * outputs * channels * KERNEL**2,
        moved_bytes=numbers * OPERANDS[dtype].itemsize,
        timing=timing,
        measured_at=time.time(),
        layout=layout,
        note=note,
    )


ROUND_S = 0.01  # a fast call is made this long in a row: one alone would find its data out of cache
LEAST, MOST = 7, 200  # times of one call
STOPPED = "Cancelled between two measurements."


def interleaved(
    calls: Sequence[tuple[Call, float]], device: torch.device, budget_s: float, stop: Stop
) -> list[Timing]:
    """Median and quartiles of each call, given with about how long it takes. Drift (clocks, heat,
    other processes) falls on all alike: rounds over all of them, for about ``budget_s`` seconds in
    all and at least :data:`LEAST` times each. Raises Cancelled between two calls when ``stop()`` is
    true."""
    timed = [
        Timed(call, max(1, min(20, int(ROUND_S / max(seconds, 1e-6))))) for call, seconds in calls
    ]
    ends = time.perf_counter() + budget_s
    while _goes_on(timed, time.perf_counter() < ends):
        for one in timed:
            if stop():
                raise Cancelled(STOPPED)
            if len(one.seconds) < MOST:
                one.seconds += times(one.call, device, one.each)
    return [summary(one.seconds) for one in timed]


def _goes_on(timed: Sequence[Timed], has_time: bool) -> bool:
    fewest = min((len(one.seconds) for one in timed), default=MOST)
    return fewest < (MOST if has_time else LEAST)


@dataclass(slots=True)
class Timed:
    """One call and its times so far."""

    call: Call
    each: int  # calls per round
    seconds: list[float] = field(default_factory=list)


def first_time(call: Call, device: torch.device) -> float:
    """Seconds of the second call: the first one loads kernels and chooses among them. A call that
    takes over a second is not repeated. Raises what the call raises."""
    took = _seconds(call, device)
    return took if took > 1 else _seconds(call, device)


def _seconds(call: Call, device: torch.device) -> float:
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started
