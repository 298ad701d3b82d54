"""What the Telemetry page knows of one run: readings by device, their sums, and its steps."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from ampscope.analysis import step_times, telemetry
from ampscope.records import RunInfo, Sample, StepRecord
from ampscope.store.reader import Reader
from app import store

# All readings of the first half hour; of longer runs the sums are estimates.
SUMMED = 20_000


@dataclass(frozen=True, slots=True)
class Telemetry:
    """One device beside one run."""

    run: RunInfo
    device: str
    samples: list[Sample]  # few enough for a chart
    steps: list[StepRecord]
    at_steps: list[int | None]  # the step under way at each sample
    usage: telemetry.Usage
    held_back: dict[str, float]  # reason -> share of the time

    @property
    def origin(self) -> float:
        """Time 0: when the run started."""
        return self.run.started or self.samples[0].at


@store.of_run
def sums(
    reader: Reader, run_id: str
) -> tuple[dict[str, tuple[telemetry.Usage, dict[str, float]]], tuple[str, ...]]:
    """Of every device its usage and what held it back; sentences on what disturbed the run."""
    samples = reader.samples(run_id, SUMMED)
    own = telemetry.by_device(samples).items()
    by_name = {name: (telemetry.usage(s), telemetry.held_back(s)) for name, s in own}
    return by_name, telemetry.spoiled(samples)


def read(run: RunInfo, device: str) -> Telemetry:
    """``device`` is one of those in :func:`sums`."""
    samples = telemetry.by_device(store.samples(run, store.POINTS))[device]
    steps = store.steps(run)
    used, held = sums(run)[0][device]
    at_steps = step_times.steps_at(samples, steps)
    return Telemetry(run, device, samples, steps, at_steps, used, held)


def table(found: Telemetry) -> pd.DataFrame:
    """Every reading of the device, none left out; beside it the time since the run's start and the
    step under way."""
    samples = telemetry.by_device(store.samples(found.run))[found.device]
    frame = pd.DataFrame(samples)
    frame.insert(2, "seconds", frame["at"] - found.origin)
    frame.insert(3, "step", pd.Series(step_times.steps_at(samples, found.steps), dtype="Int64"))
    return frame
