"""What a batch search says: the largest batch a precision, and where throughput levels off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampscope.record_json import dumps
from ampscope.records import BatchPrediction, BatchTrial, LargestBatch, Result, RunInfo

KNEE_SHARE = 0.9  # of the best throughput: beyond it more memory buys almost no speed


@dataclass(frozen=True, slots=True)
class BatchSearch:
    """The search of one precision; ``trials`` in the order of their size."""

    precision: str
    trials: tuple[BatchTrial, ...]
    prediction: BatchPrediction | None
    largest: LargestBatch | None  # None while it goes on

    @property
    def is_bounded(self) -> bool:
        """Whether the search ended with a batch that is too large, next to one that fits."""
        return self.largest is not None and self.largest.too_many is not None

    @property
    def knee(self) -> BatchTrial | None:
        """The smallest tried batch that reaches :data:`KNEE_SHARE` of the best throughput."""
        timed = [(t, t.samples_s) for t in self.trials if t.samples_s is not None]
        best = max((rate for _, rate in timed), default=0.0)
        return next((t for t, rate in timed if rate >= KNEE_SHARE * best), None)

    @property
    def levels_off(self) -> bool:
        """Whether a batch beyond the knee was timed: else throughput may grow further."""
        knee = self.knee
        return knee is not None and any(t.step and t.samples > knee.samples for t in self.trials)


def batches_by_precision(results: Iterable[Result]) -> tuple[BatchSearch, ...]:
    """In the order in which they were made."""
    found = [r for r in results if isinstance(r, BatchTrial | BatchPrediction | LargestBatch)]
    return tuple(_search(name, found) for name in dict.fromkeys(r.precision for r in found))


def sentence(searches: tuple[BatchSearch, ...]) -> str:
    """The answer: ``fp32 fits 128 samples (136 do not); bf16 fits 1.6 times that, 200 samples (208
    do not).`` A search that ended before a batch was too large says how many fit at least, and
    nothing is set against it."""
    ended = [s for s in searches if s.largest is not None]
    if not ended:
        return "The search goes on."
    first, *others = ended
    assert first.largest is not None
    if not others or not first.largest.samples:
        return f"{first.precision} fits {_samples(first)}."
    parts = []
    for other in others:
        assert other.largest is not None
        ratio = other.largest.samples / first.largest.samples
        times = f"{ratio:.2g} times that, " if first.is_bounded and other.is_bounded else ""
        parts.append(f"{other.precision} fits {times}{_samples(other)}")
    return f"{first.precision} fits {_samples(first)}; {'; '.join(parts)}."


def _search(name: str, found: list[BatchTrial | BatchPrediction | LargestBatch]) -> BatchSearch:
    own = [r for r in found if r.precision == name]
    trials = [r for r in own if isinstance(r, BatchTrial)]
    return BatchSearch(
        name,
        tuple(sorted(trials, key=lambda t: t.samples)),
        next((r for r in own if isinstance(r, BatchPrediction)), None),
        next((r for r in own if isinstance(r, LargestBatch)), None),
    )


def _samples(search: BatchSearch) -> str:
    largest = search.largest
    assert largest is not None
    if not largest.samples:
        held = max((t.samples for t in search.trials if t.fits), default=0)
        tried = f"no batch of the sizes asked for, though {held:,} samples fit"
        return tried if held else "not even the smallest batch"
    if not search.is_bounded:
        return f"at least {largest.samples:,} samples (the search ended there)"
    return f"{largest.samples:,} samples ({largest.too_many:,} do not)"


def searches_json(
    info: RunInfo, searches: tuple[BatchSearch, ...], spoiled: Sequence[str] = ()
) -> str:
    """Every trial, prediction and result, with the machine, the date and what disturbed them."""
    content = {
        "schema": 1,
        "run": info.id,
        "workload": info.spec.workload,
        "size": info.spec.size,
        "machine": dataclasses.asdict(info.machine) if info.machine else None,
        "measured_at": info.started,
        "memory_limit_mib": info.spec.memory_limit_mib or None,
        "note": info.message,
        "spoiled": list(spoiled),
        "sentence": sentence(searches),
        "precisions": [
            {**dataclasses.asdict(s), "knee": s.knee.samples if s.knee else None} for s in searches
        ],
    }
    return dumps(content, indent=2)
