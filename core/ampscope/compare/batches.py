"""What a batch search says: the largest batch a precision, and where throughput levels off."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampscope.records import BatchPrediction, BatchTry, LargestBatch, Result, RunInfo

KNEE_SHARE = 0.9  # of the best throughput: beyond it more memory buys almost no speed


@dataclass(frozen=True, slots=True)
class BatchSearch:
    """The search of one precision; ``tries`` in the order of their size."""

    precision: str
    tries: tuple[BatchTry, ...]
    prediction: BatchPrediction | None
    largest: LargestBatch | None  # None while it goes on

    @property
    def knee(self) -> BatchTry | None:
        """The smallest tried batch that reaches :data:`KNEE_SHARE` of the best throughput."""
        timed = [(t, t.samples_s) for t in self.tries if t.samples_s is not None]
        best = max((rate for _, rate in timed), default=0.0)
        return next((t for t, rate in timed if rate >= KNEE_SHARE * best), None)


def by_precision(results: Iterable[Result]) -> tuple[BatchSearch, ...]:
    """In the order in which they were made."""
    found = [r for r in results if isinstance(r, BatchTry | BatchPrediction | LargestBatch)]
    return tuple(_search(name, found) for name in dict.fromkeys(r.precision for r in found))


def sentence(searches: tuple[BatchSearch, ...]) -> str:
    """The answer: ``bf16 fits 1.6 times the batch of fp32: 208 samples against 128.``"""
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
        parts.append(f"{other.precision} fits {ratio:.2g} times that, {_samples(other)}")
    return f"{first.precision} fits {_samples(first)}; {'; '.join(parts)}."


def _search(name: str, found: list[BatchTry | BatchPrediction | LargestBatch]) -> BatchSearch:
    own = [r for r in found if r.precision == name]
    tries = [r for r in own if isinstance(r, BatchTry)]
    return BatchSearch(
        name,
        tuple(sorted(tries, key=lambda t: t.samples)),
        next((r for r in own if isinstance(r, BatchPrediction)), None),
        next((r for r in own if isinstance(r, LargestBatch)), None),
    )


def _samples(search: BatchSearch) -> str:
    largest = search.largest
    assert largest is not None
    if not largest.samples:
        held = max((t.samples for t in search.tries if t.fits), default=0)
        tried = f"no batch of the sizes asked for, though {held:,} samples fit"
        return tried if held else "not even the smallest batch"
    proof = f"{largest.too_many:,} do not" if largest.too_many else "more were not tried"
    return f"{largest.samples:,} samples ({proof})"


def searches_json(
    info: RunInfo, searches: tuple[BatchSearch, ...], spoiled: Sequence[str] = ()
) -> str:
    """Every try, prediction and result, with the machine, the date and what disturbed them."""
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
    return json.dumps(content, indent=2)
