"""Results of comparisons and batch searches, written by hand: literal numbers, no measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ampscope.records import (
    BatchPrediction,
    BatchTrial,
    LargestBatch,
    LossCurve,
    Machine,
    MemorySplit,
    Result,
    RunSpec,
    State,
    StepTimes,
    Timing,
)
from ampscope.store.writer import RunWriter

MIB = 2**20
CPU = Machine("cpu", "Test CPU, 2 cores", "native", "AVX2 AVX512-BF16", "2.13.0+cpu", "3.11.7")
LOSSES = {0: (3.0, 2.0, 1.00), 1: (3.0, 2.0, 1.20), 2: (3.0, 2.0, 1.10)}  # by seed


def timing(median_s: float, spread: float = 0.02) -> Timing:
    return Timing(median_s, median_s * (1 - spread), median_s * (1 + spread), 50)


def times(
    precision: str, step_s: float, samples: int = 8, *, is_base: bool = True, casts: float = 0.01
) -> StepTimes:
    parts = [timing(step_s * share) for share in (0.3, 0.6, 0.1)]
    return StepTimes(precision, samples, timing(step_s), *parts, casts, 1_000.0, is_base)


def memory(
    precision: str, activations: int, fixed: int = 20 * MIB, samples: int = 8, *,
    is_base: bool = True,
) -> MemorySplit:  # fmt: skip
    return MemorySplit(
        precision, samples, fixed // 2, 0, fixed // 2, activations, 0, 0, 0, None, 1_000.0, is_base
    )


def curves(precision: str, shift: float = 0.0, seeds: Sequence[int] = (0, 1, 2)) -> list[Result]:
    """Three steps a seed; the last third is the last step."""
    return [
        LossCurve(precision, seed, tuple(loss + shift for loss in LOSSES[seed]), ())
        for seed in seeds
    ]


def compared(
    fp32_s: float = 0.2, half_s: float = 0.1, shift: float = 0.01, half: str = "bf16",
    larger: tuple[float, float] = (0.8, 0.4),
) -> list[Result]:  # fmt: skip
    """fp32 and a half precision, at 8 samples and at 32."""
    return [
        *curves("fp32"),
        *curves(half, shift),
        times("fp32", fp32_s),
        times(half, half_s),
        memory("fp32", 80 * MIB),
        memory("fp32", 160 * MIB, samples=16, is_base=False),
        memory(half, 40 * MIB),
        memory(half, 80 * MIB, samples=16, is_base=False),
        times("fp32", larger[0], 32, is_base=False),
        times(half, larger[1], 32, is_base=False),
    ]


def searched() -> list[Result]:
    """fp32 fits 128 samples, bf16 200."""
    return [
        made_trial("fp32", 64, 0.05),
        BatchPrediction("fp32", 20 * MIB, MIB, 150 * MIB, 128),
        made_trial("fp32", 128, 0.06),
        made_trial("fp32", 136, None),
        LargestBatch("fp32", 128, 136, 3),
        made_trial("bf16", 64, 0.05),
        made_trial("bf16", 200, 0.14),
        made_trial("bf16", 208, None),
        LargestBatch("bf16", 200, 208, 3),
    ]


def made_trial(precision: str, samples: int, step_s: float | None) -> BatchTrial:
    if step_s is None:
        return BatchTrial(precision, samples, False, None, None, None, "Out of memory.", 1_000.0)
    peak = 20 * MIB + samples * MIB
    return BatchTrial(precision, samples, True, peak, None, timing(step_s), "", 1_000.0)


def diverged(precision: str) -> list[Result]:
    return [LossCurve(precision, seed, (3.0, math.inf, math.nan), (1,)) for seed in (0, 1, 2)]


def stored(
    store: Path, kind: str, results: Sequence[Result], state: State = State.FINISHED,
    message: str = "",
) -> str:  # fmt: skip
    """A measurement's run in ``store``; returns its id."""
    precision = ",".join(dict.fromkeys(getattr(r, "precision", "fp32") for r in results)) or "fp32"
    spec = RunSpec("gpt", kind=kind, size="small", precision=precision, policy="native", seeds=3)
    writer = RunWriter.create(store, spec)
    writer.start(CPU)
    for result in results:
        writer.add_result(result)
    writer.flush()
    if state is not State.RUNNING:
        writer.finish(state, message)
    writer.close()
    return writer.run_id
