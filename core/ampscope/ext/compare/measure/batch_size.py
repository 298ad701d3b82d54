"""The largest batch that fits, for each precision: extrapolated from two small trials, then
verified.

    try the workload's own batch and twice that: memory = fixed + samples times so much
    start at the prediction; step away from it, each stride twice the last, until one size fits and
    a larger one does not; halve the distance until they are neighbours
    then time some smaller sizes, for the curve of throughput

Each trial is a child process (:mod:`.batch_trials`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ampscope.errors import BadInput, Cancelled
from ampscope.ext.compare.measure.batch_trials import TookTooLong, Trials
from ampscope.measure.timing import Limit
from ampscope.records import BatchPrediction, BatchTrial, LargestBatch, RunSpec
from ampscope.store.writer import RunWriter

MOST_SAMPLES = 1 << 20
SAME_SHARE = 0.95  # of the free memory; contexts and caches of others move a little
FAR = 8  # times the largest trial that a prediction rests on
CURVE_SIZES = 5  # smaller sizes that are timed, each half of the next


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Search for every precision in turn; one sentence on what was not proved."""
    limit = Limit(spec.time_limit_s)
    trials = Trials(device, _bound(spec, 0) if device.type == "cpu" else 0)
    free_at_first = trials.free_bytes() if device.type == "cuda" else 0
    limit_bytes = _bound(spec, free_at_first)
    notes = []
    for place, name in enumerate(spec.precisions):
        share = limit.left_s() / (len(spec.precisions) - place)
        search = _Search(
            dataclasses.replace(spec, precision=name),
            trials,
            writer,
            limit,
            limit.left_s() - share,
            is_cancelled,
        )
        notes += search.run(limit_bytes)
    if free_at_first and (free := trials.free_bytes()) < SAME_SHARE * free_at_first:
        notes.append(
            f"Of the GPU {free_at_first / 2**20:,.0f} MiB were free at the beginning and "
            f"{free / 2**20:,.0f} at the end: another process filled it meanwhile. Search again."
        )
    return " ".join(notes)


def _bound(spec: RunSpec, free_bytes: int) -> int:
    """Bytes that training may take: those asked for, of a GPU no more than its ``free_bytes``."""
    bounds = [bound for bound in (spec.memory_limit_mib * 2**20, free_bytes) if bound]
    if not bounds:
        raise BadInput("On a CPU say how much memory training may take: --memory-limit MIB.")
    return min(bounds)


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes that are tried: multiples of ``step``, or powers of two where it is 0."""

    step: int

    def samples(self, place: int) -> int:
        return place * self.step if self.step else 2 ** (place - 1) if place else 0

    def place(self, samples: float) -> int:
        """Of the largest size that is not above ``samples``."""
        if samples < 1:
            return 0
        return int(samples // self.step) if self.step else int(samples).bit_length()


class _Search:
    """For one precision. ``reserved_s`` belongs to the precisions after it."""

    def __init__(
        self, spec: RunSpec, trials: Trials, writer: RunWriter, limit: Limit, reserved_s: float,
        is_cancelled: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._spec, self._trials, self._writer = spec, trials, writer
        self._limit, self._reserved_s, self._is_cancelled = limit, reserved_s, is_cancelled
        self._grid = Grid(spec.multiple_of)
        self._made: dict[int, BatchTrial] = {}
        self._prediction: BatchPrediction | None = None

    def run(self, limit_bytes: int) -> list[str]:
        """Search and write what was found; sentences on what was not proved."""
        name, too_long = self._spec.precision, ""
        base = self._run_trial(self._spec.batch)
        low, start = (base.samples if base.fits else 0), None
        high = None if base.fits else base.samples
        fails: int | None = None
        fits, is_proved = self._grid.place(low), False
        try:
            if base.fits:
                twice = self._run_trial(base.samples * 2)
                low, high = (twice.samples, None) if twice.fits else (low, twice.samples)
                start = self._predicted(base, twice, limit_bytes)
                if start is not None and self._grid.samples(start) > FAR * twice.samples:
                    # At a few samples the optimizer's step may need most: look nearer to the end.
                    nearer = self._run_trial(self._grid.samples(start) // FAR)
                    if nearer.fits:
                        low, start = nearer.samples, self._predicted(twice, nearer, limit_bytes)
                if self._prediction is not None:
                    self._writer.add_result(self._prediction)
            fits, fails = self._grid.place(low), None if high is None else self._grid.place(high)
            if fails is not None and self._grid.samples(fails) < (high or 0):
                fails += 1  # the size that failed lies between two of the grid
            fits, fails, is_proved = self._narrowed(fits, fails, start)
        except TookTooLong as error:
            too_long = f" {error}"
            fits = max(
                (self._grid.place(m.samples) for m in self._made.values() if m.fits), default=0
            )
        too_many = None if fails is None else self._grid.samples(fails)
        largest = self._grid.samples(fits)
        self._writer.add_result(LargestBatch(name, largest, too_many, len(self._made)))
        if is_proved:
            self._curve(largest)
        self._writer.flush()
        return [] if is_proved else [f"{name}: the time limit ended the search early.{too_long}"]

    def _narrowed(
        self, fits: int, fails: int | None, start: int | None
    ) -> tuple[int, int | None, bool]:
        """Places of the grid: the largest that fits and the smallest that does not."""
        stride = 1
        top = self._grid.place(MOST_SAMPLES)
        place = start if start is not None else fits + 1
        while fails is None or fails - fits > 1:
            if fits >= top:
                return fits, None, True
            if self._left_s() < 0:
                return fits, fails, False
            upper = top if fails is None else fails - 1
            place = min(max(place, fits + 1), upper)
            if self._run_trial(self._grid.samples(place)).fits:
                fits = place
                place = fits + stride if fails is None else (fits + fails) // 2
            else:
                fails = place
                place = max(fails - stride, (fits + fails) // 2)
            stride *= 2
        return fits, fails, True

    def _predicted(self, base: BatchTrial, twice: BatchTrial, limit_bytes: int) -> int | None:
        peaks = [t.device_peak or t.peak_bytes or 0 for t in (base, twice)]
        grown = twice.samples - base.samples
        per_sample = (peaks[1] - peaks[0]) // grown if twice.fits and grown > 0 else 0
        if per_sample <= 0:
            return None
        fixed = max(peaks[0] - per_sample * base.samples, 0)
        place = self._grid.place(min((limit_bytes - fixed) / per_sample, MOST_SAMPLES))
        largest = self._grid.samples(place)
        self._prediction = BatchPrediction(
            self._spec.precision, fixed, per_sample, limit_bytes, largest
        )
        return place

    def _curve(self, largest: int) -> None:
        size = largest
        for _ in range(CURVE_SIZES):
            size //= 2
            if size < 1 or self._left_s() < 0:
                return
            try:
                self._run_trial(size)
            except TookTooLong:
                return

    def _run_trial(self, samples: int) -> BatchTrial:
        if self._is_cancelled():
            raise Cancelled(f"Cancelled after {len(self._made)} trials.")
        if samples in self._made:
            return self._made[samples]
        made = self._trials.attempt(self._spec, samples, self._limit.left_s())
        self._made[made.samples] = made
        self._writer.add_result(made)
        self._writer.flush()
        return made

    def _left_s(self) -> float:
        return self._limit.left_s() - self._reserved_s
