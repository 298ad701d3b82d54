"""Lesson 12: what half precision gains on this machine: matmuls, misaligned sizes, whole models.

matmuls       square ones, small to large, in every dtype, interleaved
misaligned    sizes that are no multiple of 8
models        a step of a tiny MLP and of a small GPT, in fp32 and under bf16 autocast
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.measure.matmuls import matmul, matmul_rate, refusal
from ampscope.measure.rates import first_time, interleaved
from ampscope.measure.training_steps import batch_of, prepared, step_times, timed_step
from ampscope.records import Reading, Result, RunSpec

INFO = LessonInfo(
    id="speed",
    number=12,
    title="Speed",
    icon="bolt",
    sentence="Half precision is faster where the hardware has instructions for it, and shapes that "
    "fit.",
    is_speed=True,
)
SIZES = {"cpu": (64, 128, 256, 512), "cuda": (512, 1024, 2048, 4096)}
DTYPES = ("fp32", "tf32", "bf16", "fp16")
BUDGET_S = 0.3  # a size
LONGEST_S = 0.06  # of one matmul: fp16 on most CPUs takes 40 times as long as fp32
MISALIGNED = {"cpu": (512, 511, 505), "cuda": (4096, 4095, 4089)}
MODELS = (("mlp", "tiny", 40), ("gpt", "tiny", 8))  # workload, size, steps
WARM_UP = 2


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """Rates, then step times."""
    with torch.no_grad():
        for size in SIZES[device.type]:
            yield from _rates("square", [(dtype, size) for dtype in DTYPES], device)
        # The stored name of the series of misaligned sizes.
        yield from _rates("misaligned", [("bf16", n) for n in MISALIGNED[device.type]], device)
    for workload, scale, steps in MODELS:
        yield from _model(workload, scale, steps, device)


def _rates(series: str, wanted: list[tuple[str, int]], device: torch.device) -> Iterator[Result]:
    ready = []
    for dtype, size in wanted:
        if refusal(dtype, device):
            continue
        call = matmul(dtype, (size, size, size), device)
        call()  # the first chooses a kernel
        took = first_time(call, device)
        if took <= LONGEST_S:
            ready.append((dtype, size, call, took))
        else:
            yield Reading("too slow here", dtype, took, f"{size}")
    timings = interleaved([(call, took) for _, _, call, took in ready], device, BUDGET_S, _never)
    for (dtype, size, _, _), timing in zip(ready, timings, strict=True):
        yield matmul_rate(series, dtype, (size, size, size), timing)


def _model(workload: str, size: str, steps: int, device: torch.device) -> Iterator[Result]:
    """Both precisions interleaved; StepTimes names them ``mlp fp32``."""
    spec = RunSpec(workload=workload, size=size, precision="fp32,bf16", policy="native")
    trainings = prepared(spec, device)
    batches = {name: batch_of(training, spec) for name, training in trainings.items()}
    seen: dict[str, list[object]] = {name: [] for name in trainings}
    for step in range(WARM_UP + steps):
        for name, training in trainings.items():
            one = timed_step(training, batches[name])
            if step >= WARM_UP:
                seen[name].append(one)
    for name, taken in seen.items():
        yield step_times(f"{workload} {name}", 0, taken, None)  # type: ignore[arg-type]


def _never() -> bool:
    return False
