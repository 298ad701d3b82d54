"""What the Training page reads of one run."""

from __future__ import annotations

from ampscope.analysis.training import Training, training_of
from ampscope.records import Role, RunInfo
from app import store

MOST_POINTS, FEWEST_POINTS = 1000, 100  # of a run's curve; of each of very many ranks


def read(run: RunInfo, ranks: int = 1) -> Training:
    """In a time that does not depend on how long the run is."""
    points = max(FEWEST_POINTS, MOST_POINTS // ranks)
    steps = store.steps(run, points=points)
    return training_of(run, steps, store.totals(run), store.events(run))


def spans(run: RunInfo) -> list[tuple[int, int]]:
    """First and last step of the frames, of the role that has most."""
    return max((store.frame_spans(run, role) for role in Role), key=len)
